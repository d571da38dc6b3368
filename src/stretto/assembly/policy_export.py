"""`export`: writes the policy of a run into a folder of its own, whole or as an adapter, and uploads it.

A finished run has its policy in `policy/`. That of any other run is its newest version: the trainer is restored from
the last checkpoint, and the updates after it are trained again from the journal.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers.utils import logging as transformers_logging

from stretto.assembly.data_record import recorded_template
from stretto.assembly.export import export_policy, name_base, readme
from stretto.assembly.hub_upload import refuse_no_login, upload
from stretto.assembly.retrain import made_trainer, recorded_recipe
from stretto.errors import RunError
from stretto.local.trainer import ThreadedTrainer
from stretto.models.adapter_config import BASE_FOLDER, CONFIG_FILE, read_adapter_config
from stretto.models.loading import has_tokenizer, load_tokenizer
from stretto.run.folder_checks import refuse_unwritable, standing
from stretto.run.phases import Phases
from stretto.setup.merged_models import write_merged
from stretto.setup.trainer_recovery import bring_back, refuse_another_base, usable_checkpoint
from stretto.store.reader import JournalReader
from stretto.store.resume_point import recorded_checksums
from stretto.store.schema import JOURNAL_NAME, journal_path
from stretto.store.version_files import VersionFiles


def export(
    run: Path,
    out: Path | None,
    *,
    merge: bool = False,
    push: str | None = None,
    public: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes the policy of a run to `out`, and uploads it to the hub under the name `push`, or does one of the two.

    With `merge`, the adapter of the policy is added to its base, and the result is a whole model. `out` must be new.
    Raises `RunError`, and leaves nothing behind, if there is no policy, or it cannot be written or uploaded.
    """
    if out is None and push is None:
        raise RunError("`export` needs `-o FOLDER`, or `--push NAME` for the hub, or both")
    if out is not None:
        if out.exists():
            raise RunError(f"`{out}` exists already; choose another `-o`")
        refuse_unwritable(out)
    if push is not None:
        refuse_no_login(push)
    transformers_logging.disable_progress_bar()
    parent = Path(tempfile.gettempdir()) if out is None else out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".stretto-export-", dir=parent))
    except OSError as error:
        raise RunError(f"nothing can be written to `{parent}`: {error}") from error
    try:
        made = scratch / "made"
        _write(run, made, scratch, merge=merge, place=push or out or made, say=say)
        if push is not None:
            upload(made, push, public=public, say=say)
        if out is not None:
            if push is not None:
                (made / "README.md").write_text(_readme(run, made, out))
            _settle(made, out)
            say(f"the policy is in {out}")
    except OSError as error:
        raise RunError(f"the policy cannot be written to `{out or scratch}`: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _settle(made: Path, out: Path) -> None:
    """Gives a folder its final name, by which an adapter refers to the base in it."""
    if (made / CONFIG_FILE).is_file() and (made / BASE_FOLDER).is_dir():
        name_base(made, str((out / BASE_FOLDER).absolute()))
    made.chmod(0o755)
    made.rename(out)


def _write(run: Path, made: Path, scratch: Path, *, merge: bool, place: str | Path, say: Callable[[str], None]) -> None:
    """Writes the policy of a run to the folder `made`."""
    policy = _policy(run, scratch / "policy", say)
    if merge:
        if not (policy / CONFIG_FILE).is_file():
            raise RunError(f"`--merge` has no effect: the policy of `{run}` is a whole model already; leave it out")
        config = read_adapter_config(policy)
        if config.base_path is None:
            raise RunError(f"the adapter in `{policy}` does not say which base it is of, so it cannot be merged")
        say(f"merging the adapter in {policy} with its base {config.base_path}; both stay as they are")
        write_merged(config.base_path, policy, made)
        if has_tokenizer(policy):  # with the chat template of the training
            load_tokenizer(str(policy)).save_pretrained(made)
    elif policy.is_relative_to(scratch):
        policy.rename(made)
    else:
        shutil.copytree(policy, made)
    (made / "README.md").write_text(_readme(run, made, place))


def _policy(run: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """Returns the folder of a run's policy; that of a run that is not finished is made in `folder`."""
    if not (run / JOURNAL_NAME).exists() and any((run / name).is_file() for name in (CONFIG_FILE, "config.json")):
        return run  # a policy folder
    journal = journal_path(run)
    if standing(run) == "finished" and (run / "policy").is_dir():
        return run / "policy"
    asyncio.run(_newest_version(run, journal, folder, say))
    return folder


async def _newest_version(run: Path, journal: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Writes the policy of the newest version that a run has made."""
    checksums = recorded_checksums(journal)
    if not checksums:
        raise RunError(f"the run in `{run}` ended before it had a version; there is nothing to export")
    newest, recipe = max(checksums), recorded_recipe(run)
    say(f"the run in {run} is not finished: version {newest}, its newest, is exported")
    phases = Phases.recorded(journal) or Phases.only(recipe)
    with JournalReader(journal) as reader:
        templated = reader.facts().templated
    trainer: ThreadedTrainer = made_trainer(recipe, say, phases.learning_rates)
    files = VersionFiles(run / "versions")
    try:
        await refuse_another_base(trainer, journal)
        checkpoint, sampled = await usable_checkpoint(
            run, newest, newest,
            ages=phases.retrained_ages, journal=journal, checksums=checksums, versions=files, say=say,
        )  # fmt: skip
        way = bring_back(
            trainer, checkpoint, newest,
            journal=journal, checksums=checksums, versions=files, sampled=sampled, needed={newest}, say=say,
        )  # fmt: skip
        async for made in way:
            if made.checksum != checksums[newest]:
                say(f"version {newest} was trained again with other bits than the run had: it differs by rounding")
        await export_policy(trainer, folder, recipe, templated=templated, chat_template=recorded_template(journal))
    finally:
        files.close()
        trainer.close()


def _readme(run: Path, made: Path, place: str | Path) -> str:
    """Returns the README of a policy that is loaded from `place`."""
    templated = (made / "chat_template.jinja").is_file()
    if (run / JOURNAL_NAME).is_file():
        with JournalReader(run) as reader:
            templated = reader.facts().templated
    config = read_adapter_config(made) if (made / CONFIG_FILE).is_file() else None
    base = None if config is None else config.base or "its base"
    return readme(place, base=base, with_base=(made / BASE_FOLDER).is_dir(), templated=templated)
