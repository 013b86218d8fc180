"""Teachers are looked at before any process of a site starts."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from composer_prime.config import RunPaths
from composer_prime.errors import TeacherRefused
from composer_prime.sites.embedded.local_run import Surroundings, run_local
from tests.servers.fake_inference import save_tokenizer
from tests.servers.fake_teacher import FakeTeacher, serving_teacher
from tests.sites.fake_site import fake_roles, small_recipe


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("table", ["replay", "hints"])
def test_a_teacher_with_another_tokenizer_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, is_same: bool
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    model = save_tokenizer(tmp_path / "model")
    surroundings = Surroundings(
        console=Console(file=io.StringIO()),
        role_command=fake_roles(trainer="steps=8 ending=result"),
        model_command=lambda recipe: ["echo", str(model)],
    )
    teacher = FakeTeacher(decode=lambda text: text if is_same else text[::-1], key="Bearer sesame")
    with serving_teacher(teacher) as url:
        server = {"base_url": url, "api_key_var": "TEACHER_KEY"}
        tables = {"replay": {"teachers": [{"name": "big", **server}]}, "hints": server}
        recipe = small_recipe(tmp_path, **{table: tables[table]}, sites={"count": 1})
        paths = RunPaths.of(recipe)
        if is_same:
            assert run_local(recipe, False, surroundings) == 0
            assert teacher.bodies
            return
        with pytest.raises(TeacherRefused, match=r"teacher (big|hints) has another tokenizer than the policy"):
            run_local(recipe, False, surroundings)
    assert not paths.sites.exists()
