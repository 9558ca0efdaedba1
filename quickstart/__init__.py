"""The quickstart: a small real model upcycled to a MoE, trained on sums by four processes, scored before and after."""
