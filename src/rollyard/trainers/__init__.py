"""Adapters: what a trainer calls a rollout, made of a draw. One file per trainer, none of them needed by the service.

Each needs only `rollyard.client` here, and imports its trainer's own packages when it is used: `import
rollyard.trainers.trl` works without TRL. What they share: an untrainable rollout is in neither loss nor baseline, and
an infrastructure failure is never a row with reward 0.
"""
