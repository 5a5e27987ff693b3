"""The verbs of `tidegate`, one module each; governor/cli.py says what a module has to provide."""
