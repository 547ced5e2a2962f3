"""`quire deploy`: several replicas of models, on one machine or on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from quire.cli import serve as serving
from quire.cli.options import options_named
from quire.cli.serve_models import read_deployments
from quire.cli.terminal import echo
from quire.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    from quire.scale.config import DeployConfig

AFTER_FAILURE = (
    "The settings before this deploy are not in effect any more. Mend the cause and deploy again; `quire deploy status`"
    " shows what runs, `quire deploy stop` ends it."
)
PATHS = ("config", "api_keys_file", "ssl_certfile", "ssl_keyfile")


def deploy(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG.yaml|status|stop",
            help="YAML file with the options of `quire serve`, and replicas, autoscale and resources. Or: status, to"
            " show what is deployed; stop, to end it.",
        ),
    ],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster to use; by default the one of this machine, which is started if there is none.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print status as JSON.")] = False,
    end_ray: Annotated[
        bool, typer.Option("--ray", help="With stop: also end this Ray cluster on this machine.")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--wait", help="Wait for machines that join the cluster later and have the resources.")
    ] = False,
) -> None:
    """Run replicas of models behind one server, which sends each request to the one with the least expected work."""
    try:
        from quire.scale import application, ray_cluster
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of("`quire deploy`", error.name) from error
    _check_flags(target, as_json, end_ray, waits)
    if target == "status":
        ray_cluster.connect(address)
        _show(application.status(), as_json)
    elif target == "stop":
        if end_ray and address is None and not ray_cluster.is_here():
            echo("no Ray cluster runs on this machine")
            return
        ray_cluster.connect(address)
        echo("stopped" if application.stop() else "nothing is deployed")
        if end_ray:
            ray_cluster.stop_ray()
    else:
        config = read_config(Path(target))
        ray_cluster.connect(address, starts=True)
        try:
            url = application.deploy(
                config, on_change=lambda text: echo(f"  {text}", err=True), waits_for_machines=waits
            )
        except KeyboardInterrupt:
            echo("quire: interrupted; the deployment continues: see `quire deploy status`", err=True)
            raise
        except ray_cluster.DeployFailed as error:
            raise ray_cluster.DeployFailed(f"{error}\n{AFTER_FAILURE}") from None
        _announce(url, config)


def _check_flags(target: str, as_json: bool, end_ray: bool, waits: bool) -> None:
    """Refuse flags that have no effect."""
    for flag, is_given, is_right in (
        ("--json", as_json, target == "status"),
        ("--ray", end_ray, target == "stop"),
        ("--wait", waits, target not in ("status", "stop")),
    ):
        if is_given and not is_right:
            raise InvalidRequest(f"{flag} has no effect on `quire deploy {target}`")


def read_config(path: Path) -> DeployConfig:
    """The settings of a file. Options of `quire serve` may also come from the environment, as there."""
    from quire.scale.config import DeployConfig

    if path.is_file() and not path.read_bytes().strip():
        raise InvalidRequest(f"{str(path)!r} is empty: at least `model: NAME` is needed")
    app = typer.Typer(add_completion=False)
    app.command(context_settings=serving.CONTEXT)(serving.serve)
    context = get_command(app).make_context("deploy", ["--config", str(path)], obj={"is_deployed": True})
    options: dict[str, Any] = {**context.params, "is_deployed": True}
    options.pop("model_option", None)
    for name in PATHS:  # typer makes them paths when it calls the command, which does not happen here
        options[name] = None if options[name] is None else Path(options[name])
    for name in ("kv_events", "kv_events_replay", "kv_events_topic", "memory", "idle_unload", "models_dir"):
        if options[name] is not None:
            raise InvalidRequest(f"--config {str(path)!r}: {name} is not supported with replicas")
    with options_named():
        server = serving.make_config(options)
    for number, model in enumerate(server.models):
        if model.idle_unload is not None:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].idle_unload is not supported with replicas")
    return DeployConfig(server, read_deployments(path, len(server.models)))


def _announce(url: str, config: DeployConfig) -> None:
    server = config.server
    key = "YOUR_KEY" if server.has_keys else "none"
    models = [
        f"{model.names[0]}: {one.replicas if one.autoscale is None else f'{one.autoscale.min} to {one.autoscale.max}'}"
        for model, one in zip(server.models, config.deployments, strict=True)
    ]
    echo(f"quire serves at {url}")
    echo(f"  replicas   {', '.join(models)}")
    echo(f"  export OPENAI_BASE_URL={url}/v1")
    echo(f"  export OPENAI_API_KEY={key}")
    echo(f"  export ANTHROPIC_BASE_URL={url}")
    echo(f"  page: {url}/    metrics: {url}/metrics    `quire deploy status`, `quire deploy stop`")


def _show(found: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(found, indent=1))
        return
    if found is None:
        echo("nothing is deployed")
        return
    echo(f"quire serves at {found['url']}" if found["url"] else "quire does not serve yet")
    for name, one in found["applications"].items():
        replicas = ", ".join(f"{count} {state.lower()}" for state, count in one["replicas"].items()) or "no replicas"
        echo(f"  {name}: {one['status'].lower()}, {replicas}{': ' + one['message'] if one['message'] else ''}")
