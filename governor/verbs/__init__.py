"""The verbs of `tidegate`, one module each; governor/cli.py defines their interface."""
