"""Do the tests notice when the simulator or the memory rules are wrong?"""
