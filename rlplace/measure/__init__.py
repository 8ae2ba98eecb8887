"""Measuring ops, links and plans on real devices, fits of the cost model to them, and fine-tuning by runs on a cluster."""
