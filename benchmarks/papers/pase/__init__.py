"""PaSE: the paper's networks as layer graphs, its experts and the Markov chain that it compares with."""
