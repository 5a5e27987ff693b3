"""Set up logging for the services: one event per line on stderr, as JSON unless on a terminal."""

from __future__ import annotations

import sys

import structlog


def configure() -> None:
    """Set up structlog for this process."""
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        processors.append(structlog.dev.ConsoleRenderer())  # it shows exceptions itself
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        # Writes a line with its end at once, even to an unbuffered stderr (PYTHONUNBUFFERED), which
        # two drivers of one node may share.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
