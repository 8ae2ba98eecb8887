"""Where the products of a block can be cut over a tensor group, from its graph alone."""
