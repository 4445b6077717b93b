"""Rollouts on several machines: a head that leases them, and nodes that run the same pipeline.

    messages.py         the messages between head and node, and their encoding
    placement.py        which node gets a rollout: free places, its group, its image and set-up
    nodes.py            at the head: the connected nodes, what each holds, and when one is lost
    leasing.py          a pipeline that leases rollouts to nodes, and takes them back
    leased.py           a rollout that is leased to a node
    lost_attempts.py    which lost attempts do not count
    head.py             the head: such a pipeline, and the calls of its nodes
    ledger.py           the store of a node's pipeline: its writes go to the head
    head_connection.py  a node's calls to the head
    node_pipeline.py    a node's pipeline, which reports when it has room
    node.py             a node: joins, takes leases, hands over results, survives the loss of its head
    views.py            at the head: what it asks nodes about running rollouts while people look
    view_sender.py      a node's answers
    tokenizer_files.py  tokenizer files that nodes get from the head
    ray_*.py            nodes on a Ray cluster: host (in the service), driver and actor (in Ray)
    slurm*.py           the batch script of a Slurm job, and the commands around it

Invariants. (id, attempt) is the fencing token: the store rejects reports of an attempt that was given back. A lease is
durable in the store before the node receives it. A node repeats a report until the head has answered that it is
durable.
"""
