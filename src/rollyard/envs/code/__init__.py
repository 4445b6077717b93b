"""The `code` environment: a question that is answered with a program, scored by hidden tests."""

from rollyard.envs.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
