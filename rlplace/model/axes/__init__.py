"""Which dimensions of tensors run along which loop of an op: access rules, kinds of ops."""
