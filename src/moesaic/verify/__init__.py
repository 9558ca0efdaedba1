"""What proves a topology (``moesaic verify``), and compares what two runs left behind (``moesaic diff``)."""
