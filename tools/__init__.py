"""What is run by hand: how files of this repository that no one writes by hand were made."""
