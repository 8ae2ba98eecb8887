"""m-SCT: small communication times, favorite children by a linear program."""
