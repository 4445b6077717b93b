"""Adapters that convert draws and groups to the samples of a trainer. One module per trainer; the service needs none.

Each needs only `rollyard.client`, and imports its trainer's packages when it is used: `import rollyard.trainers.trl`
works without TRL. In all of them, an untrainable rollout is in neither loss nor baseline, and an infrastructure failure
is never a row with reward 0.
"""
