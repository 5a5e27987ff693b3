"""The node's daemon: admission, the books, the arbiter on a thread of its own, and the command."""
