"""ParDNN: slicing, mapping and the memory step for graphs of hundreds of thousands of ops."""
