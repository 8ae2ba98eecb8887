"""The leaderboard of learned placement: submissions, their exact check, the page; see `benchmarks.leaderboard.__main__`."""
