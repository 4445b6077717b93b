"""A Ray cluster of several nodes on one machine, told what to do by lines on its standard input."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"node_ip_address": "127.0.0.1", "num_cpus": 1, "include_dashboard": False},
    )
    say({"address": cluster.address})
    nodes: dict[str, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "add":
            node = cluster.add_node(node_ip_address="127.0.0.1", num_cpus=order.get("cpus", 1))
            nodes[node.node_id] = node
            say({"ray_id": node.node_id})
        elif order["do"] == "remove":
            cluster.remove_node(nodes.pop(order["ray_id"]), allow_graceful=True)
            say({})
        elif order["do"] == "kill_gcs":
            assert cluster.head_node is not None
            cluster.head_node.kill_gcs_server()
            say({})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
