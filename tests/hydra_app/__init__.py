"""A user's package, trained from Hydra by the tests of the launcher."""
