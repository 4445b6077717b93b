"""Rollouts outside the service: HTML pages that need no server, ATIF trajectories, and plots of runs.

Everything here works on the JSON of the API and needs neither a service nor its dependencies. What is exported was
written by agents, tools and other people's files: it is data, never code, and its size is bounded.
"""
