"""The host's driver, understood with pyelftools and mirrored ahead of time."""
