"""Shared fixtures. Tests never sleep, never use a fixed port, and leave no thread, socket or process."""
