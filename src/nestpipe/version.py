"""The version, where reading it imports nothing heavy."""

VERSION = "0.1.0"
