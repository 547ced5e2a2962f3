"""The gauntlet: every promise of reliability and security as a measured figure, in one command (`make gauntlet`)."""
