"""What a process holds of a model and its optimizer, and how it is saved, loaded and brought together."""
