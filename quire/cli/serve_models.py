"""The models of `quire serve`: from the command line, from a folder, and from the YAML file with their own settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequest, MissingExtra
from quire.weights.hub import DEFAULT_MODEL, is_model, is_path

if TYPE_CHECKING:
    from quire.engine.composition import EngineConfig
    from quire.scale.config import ModelDeployment
    from quire.server.config import ModelConfig

# Settings that a model in the YAML file may have.
ENGINE_FIELDS = (
    *(
        "max_model_len",
        "max_num_seqs",
        "num_blocks",
        "kv_memory",
        "host_cache",
        "disk_cache",
        "dtype",
        "precision",
        "quantize",
        "kv_cache_dtype",
        "backend",
        "load_format",
    ),
    *("device", "threads"),
)
DEPLOY_FIELDS = ("replicas", "autoscale", "resources")  # of `quire deploy`
# Options whose values are paths; state_dir may also be `none`.
PATHS = ("models_dir", "api_keys_file", "ssl_certfile", "ssl_keyfile", "state_dir", "cache_dir")


def read_file(path: Path, *, is_deployed: bool = False) -> dict[str, Any]:
    """The options in the YAML file, with underscores in names. Paths relative to its folder are made absolute.

    `is_deployed`: the file is for `quire deploy`, whose own settings are left out.
    """
    values = _read_values(path)
    entries = values.get("models")
    for settings in (values, *(entries if isinstance(entries, list) else ())):
        for name in DEPLOY_FIELDS if isinstance(settings, dict) else ():
            if name not in settings:
                continue
            if not is_deployed:
                raise InvalidRequest(f"--config {str(path)!r}: {name} is a setting of `quire deploy`, not of a server")
            del settings[name]
    return values


def read_deployments(path: Path, num_models: int) -> tuple[ModelDeployment, ...]:
    """The settings of `quire deploy` in a file, one for each model."""
    from quire.scale.config import parse_deployment

    values = _read_values(path)
    try:
        default = parse_deployment(values)
    except InvalidRequest as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error}") from None
    entries = values.get("models")
    if not isinstance(entries, list):
        return (default,) * num_models
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(parse_deployment(entry, default) if isinstance(entry, dict) else default)
        except InvalidRequest as error:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].{error}") from None
    return tuple(found)


def _read_values(path: Path) -> dict[str, Any]:
    import msgspec

    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any] | None) or {}
    except OSError as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error.strerror}") from None
    except ImportError:
        raise MissingExtra.of("--config", "yaml") from None
    except ValueError as error:
        raise InvalidRequest(f"--config {str(path)!r}: {error}") from None
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    if "model" in values and "models" in values:
        raise InvalidRequest(f"--config {str(path)!r}: model and models exclude each other: list all under models")
    for name in PATHS:
        if isinstance(values.get(name), str) and values[name] != "none":
            values[name] = os.path.join(_folder(path), os.path.expanduser(values[name]))
    for name in ("model", "models"):
        if name in values:
            values[name] = _anchored(values[name], path)
    return values


def _anchored(value: Any, file: Path) -> Any:
    """A model or a list of models, with paths relative to the folder of the file made absolute."""
    if isinstance(value, list):
        return [_anchored(one, file) for one in value]
    if isinstance(value, dict):
        return value | {"model": _anchored(value["model"], file)} if "model" in value else value
    if not isinstance(value, str) or value.startswith("~"):
        return value
    there = os.path.normpath(os.path.join(_folder(file), value))
    return there if is_path(value) or ("/" in value and os.path.exists(there)) else value


def _folder(file: Path) -> str:
    return os.path.dirname(os.path.abspath(file))


def models_from_environment() -> list[str]:
    """Models in QUIRE_MODEL, separated by blanks; a single path may contain blanks."""
    text = os.environ.get("QUIRE_MODEL", "").strip()
    return [text] if text and Path(text).exists() else text.split()


def list_models(options: Mapping[str, Any], engine: EngineConfig) -> tuple[ModelConfig, ...]:
    """The models of the command line, of the file and of the folder, in this order; if there are none, the default one.

    Nothing is opened or downloaded.
    """
    from quire.server.config import ModelConfig

    def plain(name: str) -> ModelConfig:
        served = _served_name(name)
        return ModelConfig(
            _place(name),
            (served,),
            served,
            engine,
            idle_unload=options["idle_unload"],
            default_max_tokens=options["default_max_tokens"],
        )

    found = [plain(name) for name in options["model"] or ()]
    found += _of_file(options, engine)
    if options["models_dir"] is not None:
        found += [plain(str(path)) for path in _of_folder(options["models_dir"])]
    found = found or [plain(DEFAULT_MODEL)]
    names = options["served_model_name"]
    if names and len(found) > 1:
        text = f"--served-model-name {names[0]!r} is for one model, and there are {len(found)}"
        raise InvalidRequest(f"{text}: name them under `models` in the --config file")
    return (replace(found[0], names=tuple(names)), *found[1:]) if names else tuple(found)


def _place(name: str) -> Path:
    """Keep the `./` of a path: without it, `./org/name` would be a name of the hub."""
    return Path(os.path.abspath(os.path.expanduser(name)) if is_path(name) else name)


def _served_name(name: str) -> str:
    """The name for clients: the name of the model, or of its file or folder."""
    if Path(name).exists():
        found = Path(os.path.abspath(name))  # links are not resolved: the name of a link is chosen on purpose
        return found.stem if found.is_file() else found.name
    return name


def _of_folder(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InvalidRequest(f"--models-dir {str(folder)!r} is not a folder")
    found = [path for path in sorted(folder.iterdir()) if is_model(path)]
    if not found:
        raise InvalidRequest(f"--models-dir {str(folder)!r} has no model: no .gguf file, no folder with config.json")
    return found


def _of_file(options: Mapping[str, Any], engine: EngineConfig) -> list[ModelConfig]:
    path = options["config"]
    is_deployed = bool(options.get("is_deployed"))
    entries = None if path is None else read_file(path, is_deployed=is_deployed).get("models")
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise InvalidRequest(f"--config {str(path)!r}: models = {entries!r:.80} is not a list")
    found: list[ModelConfig] = []
    for number, entry in enumerate(entries):
        try:
            found.append(_entry({"model": entry} if isinstance(entry, str) else entry, options, engine))
        except InvalidRequest as error:
            raise InvalidRequest(f"--config {str(path)!r}: models[{number}].{error}") from None
    return found


def _entry(entry: object, options: Mapping[str, Any], engine: EngineConfig) -> ModelConfig:
    """A model in the list of the file. Errors begin with the field."""
    from quire.server.config import ModelConfig
    from quire.server.models import priority_of

    if not isinstance(entry, dict):
        raise InvalidRequest(f"model = {entry!r:.80} is neither a name nor settings of a model")
    given = {str(name).replace("-", "_"): value for name, value in entry.items()}
    known = {
        *("model", "name", "aliases", "pinned", "preload", "idle_unload", "priority", "tool_format"),
        *("default_max_tokens", *ENGINE_FIELDS),
    }
    for field in given:
        if field not in known:
            raise InvalidRequest(f"{field}: there is no such field; there are {', '.join(sorted(known))}")
    name = _text(given, "model")
    if not name:
        raise InvalidRequest("model is missing" if name is None else "model = '' is no name, folder or file")
    served = _text(given, "name") or _served_name(name)
    aliases = given.get("aliases") or []
    aliases = [aliases] if isinstance(aliases, str) else aliases
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise InvalidRequest(f"aliases = {aliases!r:.80} is not a list of names")
    idle_s = given.get("idle_unload", options["idle_unload"])
    if idle_s is not None and (isinstance(idle_s, bool) or not isinstance(idle_s, int | float)):
        raise InvalidRequest(f"idle_unload = {idle_s!r:.80} is not a number of seconds")
    tier = _text(given, "priority")
    try:
        return ModelConfig(
            _place(name),
            (served, *aliases),
            _served_name(name),
            _engine(given, engine),
            is_pinned=_flag(given, "pinned"),
            is_preloaded=_flag(given, "preload"),
            idle_unload=idle_s,
            priority=priority_of(tier),
            tool_format=_text(given, "tool_format"),
            default_max_tokens=given.get("default_max_tokens", options["default_max_tokens"]),
        )
    except InvalidRequest as error:
        field, _, rest = str(error).partition(" = ")
        field = "name or aliases" if field == "served_model_name" else field  # as in the file
        raise InvalidRequest(f"{field} = {rest}" if rest else str(error)) from None


def _engine(given: Mapping[str, Any], engine: EngineConfig) -> EngineConfig:
    """The engine settings of a model: its own, else those of all models."""
    settings = {name: value for name, value in given.items() if name in ENGINE_FIELDS}
    types = {field.name: field.type for field in fields(engine)}
    for name, value in settings.items():
        if types[name] == "str" and not isinstance(value, str):
            raise InvalidRequest(f"{name} = {value!r:.80} is not text")
    if "kv_memory" in settings and "num_blocks" not in settings:
        settings["num_blocks"] = None  # the setting for all models would override it
    return replace(engine, **settings)


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} = {value!r:.80} is not text")
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} = {value!r:.80} is not yes or no")
    return value
