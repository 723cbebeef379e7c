"""The upload of an export: what is asked of the hub, and that nothing happens unasked. The hub is a stand-in."""

from pathlib import Path
from typing import Any, Callable

import pytest

from deepspec.config.schema import Config, ExportConfig
from deepspec.errors import ConfigError, InputRefused
from deepspec.export import hub
from deepspec.export.exporter import ExportRequest, export_drafter
from deepspec.planning.validate import validate


class StandIn:
    """Records what it is asked; ``refuses`` makes the upload fail."""

    endpoint = "https://hub.test"
    calls: list[tuple[str, dict[str, Any]]] = []
    refuses = False

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create", {"repo_id": repo_id, **options}))

    def upload_folder(self, **options: Any) -> None:
        if self.refuses:
            raise OSError("no route to host\nmore")
        folder = Path(options["folder_path"])
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        self.calls.append(("upload", options | {"names": names}))


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(hub, "HfApi", StandIn)
    monkeypatch.setattr(StandIn, "calls", [])
    return StandIn


def test_the_whole_export_with_its_card_goes_up(make_request: Callable[..., ExportRequest], api: type[StandIn]) -> None:
    folder = export_drafter(make_request())
    assert hub.push(folder, "team/drafter", private=True) == "https://hub.test/team/drafter"
    (made, repository), (sent, upload) = api.calls
    assert made == "create" and repository["private"] is True and repository["exist_ok"] is True
    assert sent == "upload" and upload["repo_id"] == "team/drafter"
    assert {"README.md", "config.json", "model.safetensors", "serving/launch.md"} <= set(upload["names"])


def test_an_unfinished_folder_stays_here(tmp_path: Path, api: type[StandIn]) -> None:
    with pytest.raises(InputRefused, match="not a finished export"):
        hub.push(tmp_path, "team/drafter", private=True)
    assert api.calls == []


def test_what_the_hub_says_is_reported(make_request: Callable[..., ExportRequest], api: type[StandIn],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "refuses", True)
    with pytest.raises(InputRefused, match="push_to_hub='team/drafter': no route to host. The export in"):
        hub.push(export_drafter(make_request()), "team/drafter", private=True)


def test_nothing_is_pushed_by_default_and_names_are_checked() -> None:
    assert ExportConfig().push_to_hub is None
    config = Config()
    config.run.name, config.target.source, config.stages = "x", "micro", ["export"]
    config.export.push_to_hub = "no owner"
    with pytest.raises(ConfigError, match="export.push_to_hub='no owner' is not possible: it must be owner/name"):
        validate(config)
