"""A Ray cluster of several nodes on one machine, controlled by lines on its standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

MEMORY = 64 << 30
"""What each node claims to have: slots follow from CPUs and memory, and these tests are about CPUs."""


def main() -> None:
    import ray
    import ray.util
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": "127.0.0.1", "num_cpus": 1, "memory": MEMORY}
    unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **unused})
    send({"address": cluster.address})
    cluster.connect()  # to end actors
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "add":
            node = cluster.add_node(node_ip_address="127.0.0.1", num_cpus=order.get("cpus", 1), memory=MEMORY)
            nodes[node.node_id] = node
            send({"ray_id": node.node_id})
        elif order["do"] == "remove":
            cluster.remove_node(nodes.pop(order["ray_id"]), allow_graceful=True)
            send({})
        elif order["do"] == "restore":
            actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
            for actor in actors:
                with contextlib.suppress(ValueError):  # it has ended by itself
                    ray.kill(ray.get_actor(actor["name"], actor["namespace"]), no_restart=True)
            while nodes:
                cluster.remove_node(nodes.popitem()[1], allow_graceful=True)
            send({})
        elif order["do"] == "kill_gcs":
            assert cluster.head_node is not None
            cluster.head_node.kill_gcs_server()
            send({})


def send(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
