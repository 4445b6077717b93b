"""Where stages run when one machine is not enough: a head that leases rollouts, and nodes that run the same pipeline.

    wire.py      what goes between head and node, and how it is written
    placing.py   which node gets a rollout: free places, its group, its image and set-up
    nodes.py     the head's side: who is there, what is out at whom, and when somebody is lost
    leasing.py   a yard that leases instead of running: what leaves the queue, and comes back
    head.py      the head: such a yard, and what its nodes say to it
    ledger.py    the store as a node's yard sees it: what it writes goes to the head
    link.py      a node's calls to the head
    yard.py      a node's yard, which tells when it has room
    node.py      a node: joins, takes leases, hands over results, survives the loss of its head
    ray_*.py     nodes on a Ray cluster: host (the service's side), driver and actor (Ray's)
    slurm*.py    the batch script of a Slurm job, and the commands around it

Invariants. (id, attempt) is the fencing token: the store refuses what an attempt says that was given back. A rollout
that is out at a node is so in the store, durably, before the node hears of it. What a node has to say is said again
until the head has answered that it is durable.
"""
