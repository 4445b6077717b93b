"""The Kubernetes manifests: valid by the schemas, complete, and with what sandboxes need.

The kustomizations use only `resources`, `namespace` and `images`, so that rendering them is a walk over the files.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollyard.service.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
INSTALLATIONS = ("single", "fleet", "kuberay")
VERSIONS = ("1.33", "1.37")
"""Schemas: the first Kubernetes with hostUsers by default, and the newest here."""


def rendered(folder: Path) -> Iterator[dict[str, Any]]:
    """The resources of a kustomization, those of the folders that it names included."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "namespace", "resources", "images"}, folder
    for name in kustomization["resources"]:
        path = folder / name
        if path.is_dir():
            yield from rendered(path)
        else:
            yield from yaml.safe_load_all(path.read_text())


def pods(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pod templates of a resource."""
    spec = resource.get("spec", {})
    groups = [spec, spec.get("headGroupSpec", {}), *spec.get("workerGroupSpecs", [])]
    yield from (group["template"] for group in groups if "template" in group)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_manifests_are_valid(installation: str, version: str):
    resources = list(rendered(FOLDER / installation))
    assert len({(each["kind"], each["metadata"]["name"]) for each in resources}) == len(resources)
    for resource in resources:
        if resource["kind"] != "RayCluster":  # a resource of KubeRay; its pod templates are checked below
            kubernetes_validate.validate(resource, version, strict=True)
        for pod in pods(resource):
            metadata = {"name": "pod", **pod.get("metadata", {})}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}, version, strict=True
            )


def test_a_wrong_field_is_found():
    (wrong,) = (copy.deepcopy(each) for each in rendered(FOLDER / "single") if each["kind"] == "StatefulSet")
    wrong["spec"]["template"]["spec"]["hostUser"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_references_between_resources_hold(installation: str):
    resources = list(rendered(FOLDER / installation))
    named = {(each["kind"], each["metadata"]["name"]) for each in resources}
    secrets = {
        "rollyard-tokens",
        "rollyard-tls",
        "rollyard-store",
    }  # created by hand, as docs/how-to/kubernetes.md says
    for resource in resources:
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "rollyard", resource
        for pod in pods(resource):
            spec = pod["spec"]
            claims = {each["metadata"]["name"] for each in resource["spec"].get("volumeClaimTemplates", [])}
            volumes = {each["name"] for each in spec["volumes"]} | claims
            assert {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]} == volumes
            for volume in spec["volumes"]:
                assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in named
                assert "secret" not in volume or volume["secret"]["secretName"] in secrets
            if "selector" in resource["spec"]:
                assert resource["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
        if resource["kind"] == "Service":
            selected = [
                port["name"]
                for other in resources
                for pod in pods(other)
                if resource["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
                for container in pod["spec"]["containers"]
                for port in container["ports"]
            ]
            assert [port["targetPort"] for port in resource["spec"]["ports"]] == selected


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_pods_can_run_sandboxes_and_have_no_privileges(installation: str):
    """Bubblewrap needs namespaces and a complete /proc; procMount is allowed only in a pod with a user namespace."""
    found = [pod["spec"] for resource in rendered(FOLDER / installation) for pod in pods(resource)]
    assert found
    for spec in found:
        assert spec["hostUsers"] is False and spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "Unconfined"}
        assert spec["terminationGracePeriodSeconds"] > Settings.model_fields["drain_s"].default
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["procMount"] == "Unmasked" and context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]} and "privileged" not in context


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_settings_in_the_config_map_are_valid(installation: str):
    (settings,) = (each["data"] for each in rendered(FOLDER / installation) if each["kind"] == "ConfigMap")
    values = tomllib.loads(settings["rollyard.toml"])
    assert values.keys() <= Settings.model_fields.keys()
    Settings.model_validate({"host": "0.0.0.0", "admin_tokens": ["x" * 32], **values})


@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_tokens_are_variables_of_the_service(installation: str):
    """As files of a Secret they would be readable by the pod's group (fsGroup), which the service refuses."""
    specs = [pod["spec"] for resource in rendered(FOLDER / installation) for pod in pods(resource)]
    volumes = [volume for spec in specs for volume in spec["volumes"]]
    assert all(volume.get("secret", {}).get("secretName") != "rollyard-tokens" for volume in volumes)
    service = specs[0]["containers"][0]  # of a fleet's resources, the head is the first
    variables = [one for one in service["env"] if "secretKeyRef" in one.get("valueFrom", {})]
    keys = {one["name"]: one["valueFrom"]["secretKeyRef"]["key"] for one in variables}
    assert keys["ROLLYARD_ADMIN_TOKENS"] == keys["ROLLYARD_TOKEN"] == "admin"
    assert installation == "kuberay" or keys["ROLLYARD_NODE_TOKENS"] == "node"


def test_the_version_of_ray_is_the_locked_one():
    (cluster,) = (each for each in rendered(FOLDER / "kuberay") if each["kind"] == "RayCluster")
    assert f"\nray=={cluster['spec']['rayVersion']} " in (ROOT / "requirements-dev.lock").read_text()
