"""The `code` environment: a question that is answered with a program, judged by hidden tests. See `environment`."""

from rollyard.envs.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
