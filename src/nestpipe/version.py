"""The version; the one place that has it.  Imports nothing."""

VERSION = "0.1.0"
