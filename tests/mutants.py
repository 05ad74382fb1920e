"""Faults planted one at a time, each of which must turn the named test red: `make mutants`.

That the tests pass says little; that they fail where the code is wrong says what they prove. Before and after code is moved, the same
faults must be seen. `test_mutants.py` keeps the table in step with the code.

    python -m tests.mutants [WORD …]     those whose file, test or area contains a word; all of them without one
    JOBS=2                               faults that are tried at the same time
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = "src/eyeline"
FAILED = 1  # pytest's exit code where tests ran, and some failed. Others: it was interrupted, or nothing ran
TIMEOUT_S = 600
FORKS = get_context("forkserver")  # tests run in forks of a process that has imported HEAVY, and nothing of ours
HEAVY = ["torch", "transformers", "hypothesis", "pyarrow.parquet", "peft"]
CRASHED = re.compile(
    r"^E +((?:NameError|UnboundLocalError|ImportError|ModuleNotFoundError): .*)", re.MULTILINE
)  # of text that aged, not of the fault


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in the file, becomes `new`; then the test fails."""

    area: str
    file: str  # below src/eyeline
    old: str
    new: str
    test: str  # below tests/: a file, with ::test if its other tests say nothing about the fault


def mutants() -> list[Mutant]:
    return [Mutant(area, *row) for area, rows in MUTANTS.items() for row in rows]


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The file with the fault in it. Raises ValueError unless the text to be replaced occurs once."""
    text = (root / SOURCE / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: {mutant.old!r} occurs {text.count(mutant.old)} times, and must occur once")
    return text.replace(mutant.old, mutant.new)


def copy_of_project(folder: Path) -> Path:
    """The files of the project that git does not ignore, as they are on disk now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def planted(mutant: Mutant, root: Path) -> Iterator[None]:
    path = root / SOURCE / mutant.file
    before = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutant, root), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str], timeout_s: float | None = None) -> tuple[int, str]:
    """Run tests in a copy of the project until the first one fails: pytest's exit code and output. TimeoutError."""
    output = root / "output.txt"
    process = FORKS.Process(target=_pytest, args=(root, output, [f"tests/{test}" for test in tests]))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError
    return process.exitcode, output.read_text(encoding="utf-8", errors="replace")


def _pytest(root: Path, output: Path, tests: list[str]) -> None:
    """In a forked process. Bytecode is not written: a file may change twice within the second that tells it apart."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    ours = [str(root / "src"), str(root)]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join(ours)}  # processes of tests have the fault, too
    sys.dont_write_bytecode = True
    sys.path[:] = [*ours, *(path for path in sys.path if Path(path) not in (Path(), ROOT, ROOT / "src"))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "eyeline")]:
        del sys.modules[name]
    sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))


def problem_with(mutant: Mutant, root: Path) -> str | None:
    """Why the mutant does not count as seen. None: its test failed."""
    try:
        with planted(mutant, root):
            code, said = run_tests(root, [mutant.test], TIMEOUT_S)
    except ValueError as error:
        return str(error)
    except TimeoutError:
        return f"no test failed within {TIMEOUT_S} s"
    if code == FAILED:
        crash = CRASHED.search(said)
        return f"the text does not fit the code: {crash[1]}" if crash else None
    return "survived" if code == 0 else f"pytest ended with {code}: {said[-1000:]}"


def main(words: Sequence[str], jobs: int) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKS.set_forkserver_preload(HEAVY)
    chosen = [one for one in mutants() if not words or any(word in " ".join((one.area, one.file, one.test)) for word in words)]
    with TemporaryDirectory() as folder:
        roots: Queue[Path] = Queue()
        for n in range(jobs):
            roots.put(copy_of_project(Path(folder, str(n))))

        def look(mutant: Mutant) -> str | None:
            root = roots.get()
            try:
                return problem_with(mutant, root)
            finally:
                roots.put(root)

        tests = sorted({one.test for one in chosen})
        with ThreadPoolExecutor(jobs) as pool:
            for code, said in pool.map(lambda n: run_tests(Path(folder, str(n)), tests[n::jobs]), range(min(jobs, len(tests)))):
                if code:
                    sys.stdout.write(f"the tests fail without any fault:\n{said[-3000:]}\n")
                    return 1
            survivors = 0
            for mutant, problem in zip(chosen, pool.map(look, chosen), strict=True):
                survivors += problem is not None
                sys.stdout.write(f"{'seen' if problem is None else 'NOT SEEN':8} {mutant.area}: {mutant.file} · {mutant.test}\n")
                if problem is not None:
                    sys.stdout.write(f"         {mutant.old!r} -> {mutant.new!r}: {problem}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - survivors} of {len(chosen)} planted faults were seen\n")
    return int(survivors > 0)


# file, text, what it becomes, the test that fails. One area per kind of promise
MUTANTS: dict[str, list[tuple[str, str, str, str]]] = {
    "rows": [
        (
            "data/layouts/marks.py",
            "return not found or found[0][0]",
            "return True",
            "data/test_marks.py::test_every_trainers_mark_is_obeyed",
        ),
        ("data/layouts/marks.py", "keeps = column not in DROPS", "keeps = True", "data/test_marks.py::test_a_row_may_mark_its_turns"),
        (
            "data/plan/read_shard.py",
            "hold_out_draw(names) if names else -1.0",
            "-1.0",
            "data/test_loader.py::test_held_out_images_are_never_trained_on",
        ),
        (
            "data/plan/plan.py",
            "+ sum(map(len, self.bins))\n\n    @cached_property",
            "\n\n    @cached_property",
            "data/test_loader.py::test_epochs_are_those_of_the_samples_that_were_given",
        ),
        (
            "data/loader.py",
            "            rejects.add(reject)",
            "            rejects.note(reject)",
            "data/test_loader.py::test_too_many_rejects_stop_the_run_at_the_same_step",
        ),
        (
            "data/rejects.py",
            "        name = (reject.file, reject.id, reject.cause)",
            "        name = (reject.file, reject.cause)",
            "data/test_rejects.py::test_a_sample_is_written_once_over_epochs_and_resumes",
        ),
        (
            "data/plan/blend.py",
            "        kept = index.kept_rows(rows.source.categories)\n        return",
            "        kept = index.kept_rows(None)\n        return",
            "data/test_loader.py::test_repeats_and_kinds_make_a_mixture",
        ),
    ],
    "images": [
        (
            "data/images/decode.py",
            "6: Pillow.Transpose.ROTATE_270",
            "6: Pillow.Transpose.ROTATE_90",
            "data/test_image_formats.py::test_a_turned_image_is_upright_by_every_way",
        ),
        (
            "core/image_rule.py",
            "return max(cell, math.floor(height / by / cell) * cell), max",
            "return max(cell, math.ceil(height / by / cell) * cell), max",
            "data/test_resizing.py::test_any_size_becomes_what_the_references_say",
        ),
        (
            "data/images/image_files.py",
            'return f"{path}@{start}+{length}"',
            "return str(path)",
            "data/test_images.py::test_keys_tell_images_apart",
        ),
        (
            "data/images/patches.py",
            "transpose(0, 3, 1, 4, 2)",
            "transpose(0, 3, 4, 1, 2)",
            "data/test_images.py::test_pixels_equal_the_reference_processor",
        ),
        (
            "data/fetch/fetch.py",
            '"augment", *group.address, number)',
            '"augment", number)',
            "data/test_loader.py::test_augmentation_follows_the_image_group",
        ),
        (
            "data/validation.py",
            "fetch_of(reader, True, None, None)",
            "fetch_of(reader, True, None, reader.data.augment)",
            "data/test_loader.py::test_validation_is_complete_repeatable_and_as_it_is",
        ),
        (
            "data/plan/index.py",
            "else written, retries) == stamp",
            "else written, retries) is not None",
            "data/test_index.py::test_changed_images_are_examined_again",
        ),
        (
            "data/fetch/fetch.py",
            "if len(document.tokens_T) != row.tokens:",
            "if False:",
            "data/test_plan.py::test_an_image_that_changes_after_it_was_planned_stops_the_run",
        ),
    ],
    "text": [
        (
            "data/text/templates.py",
            'Content("assistant\\n")]',
            'Content("assistant")]',
            "data/test_templates.py::test_tokens_equal_the_tokenizers_own",
        ),
        (
            "data/text/templates.py",
            'out += [Control("<|im_end|>", message.role == "assistant", not message.supervised), Content("\\n")]',
            'out += [Control("<|im_end|>", False, not message.supervised), Content("\\n")]',
            "data/test_templates.py::test_targets_decode_to_the_answers_and_their_ends",
        ),
        (
            "data/text/tokenizer.py",
            'record |= {"added_tokens": [], "padding"',
            'record |= {"padding"',
            "data/test_templates.py::test_control_strings_in_data_stay_text",
        ),
        (
            "data/text/templates.py",
            'supervised = message.role == "assistant" and n > last_question',
            'supervised = message.role == "assistant"',
            "data/test_templates.py::test_trained_answers_equal_generated_format",
        ),
        (
            "data/text/documents.py",
            "yield [encoder.controls[segment.token]], segment.trained and not segment.masked, False",
            "yield [encoder.controls[segment.token]], segment.trained, False",
            "data/test_marks.py::test_a_masked_answer_changes_labels_alone",
        ),
        (
            "data/text/documents.py",
            "((m.role, m.supervised, *map(_text_key, m.parts))",
            "((m.role, *map(_text_key, m.parts))",
            "data/test_marks.py::test_a_masked_answer_changes_labels_alone",
        ),
    ],
    "packs": [
        (
            "data/text/documents.py",
            "labels_T[:-1] = learned_T[1:]",
            "labels_T[:] = learned_T",
            "data/test_documents.py::test_a_document_is_as_if_written_token_by_token",
        ),
        (
            "data/fetch/batches.py",
            "(np.arange(slots) - np.repeat(bounds[:-1], spans))[:, None]",
            "np.arange(slots)[:, None]",
            "data/test_batches.py::test_a_batch_by_hand",
        ),
        (
            "data/fetch/batches.py",
            "shown = [(starts[i.key], i.tokens)",
            "shown = [(0, i.tokens)",
            "data/test_batches.py::test_random_documents_point_at_their_own_pixels",
        ),
        (
            "data/fetch/batches.py",
            "else np.flatnonzero(labels_T != IGNORE)",
            "else np.flatnonzero(labels_T > 0)",
            "data/test_batches.py::test_token_zero_is_a_token",
        ),
        (
            "data/plan/plan.py",
            "(bins[at].tokens < tokens or bins[at].patches < patches)",
            "bins[at].tokens < tokens",
            "data/test_packing.py::test_every_item_once_and_within_the_budget",
        ),
        (
            "data/plan/plan.py",
            "patches, vision = (np.maximum.reduceat",
            "patches, vision = (np.add.reduceat",
            "data/test_loader.py::test_rows_of_one_image_share_it",
        ),
    ],
    "plan": [
        (
            "data/plan/plan.py",
            "RowsMet(int(self.first_R[start:end].sum()), first, again,",
            "RowsMet(end - start, first, again,",
            "data/test_loader.py::test_row_of_a_repeated_source_counts_once",
        ),
        (
            "data/plan/order.py",
            'seed_for(seed, "visits", *address)',
            'seed_for(seed, "visits")',
            "data/test_plan.py::test_every_window_of_every_epoch_has_an_order_of_its_own",
        ),
        ("data/plan/order.py", 'seed_for(seed, "shards", epoch)', 'seed_for(0, "shards", epoch)', "data/test_plan.py::test_golden_roads"),
        (
            "data/plan/blend.py",
            "first=first, group=0",
            "first=first + 1, group=0",
            "data/test_plan.py::test_every_usable_row_once_an_epoch",
        ),
        (
            "data/plan/blend.py",
            "whole_weights[n] * (total + 1) - given[n] * summed",
            "-given[n]",
            "data/test_plan.py::test_shares_are_exact_at_any_place",
        ),
        (
            "data/plan/blend.py",
            "kept = kept & (np.cumsum(kept) <= self._limited_rows(source)[shard])",
            "pass",
            "data/test_plan.py::test_limits_over_shards",
        ),
        (
            "data/plan/blend.py",
            "for _ in range(rows.source.repeat if repeated else 1)",
            "for _ in range(1)",
            "data/test_loader.py::test_repeats_and_kinds_make_a_mixture",
        ),
        (
            "data/loader.py",
            "mine = [slot[rank] for slot in dealt]",
            "mine = [slot[0] for slot in dealt]",
            "data/test_plan.py::test_the_same_packs_for_any_number_of_ranks",
        ),
        (
            "data/loader.py",
            "        met.append(window.plan.rest)\n",
            "",
            "data/test_loader.py::test_reject_rate_is_of_different_rows_whatever_the_order",
        ),
    ],
    "resume": [
        (
            "data/loader.py",
            "replace(here, done=packs)",
            "replace(here, done=packs - 1)",
            "data/test_loader.py::test_it_resumes_exactly_after_every_step",
        ),
        (
            "data/plan/blend.py",
            '"bins": self.bins.as_json,',
            '"bins": [],',
            "data/test_plan.py::test_any_history_of_restarts_on_any_ranks_gives_the_same_steps",
        ),
        (
            "data/loader.py",
            'reader.rejects.restore(state["rejects"] if state else ',
            "reader.rejects.restore(",
            "data/test_loader.py::test_it_resumes_exactly_after_every_step",
        ),
        (
            "data/rejects.py",
            'self.repeated = {(source, shard, number) for source, shard, number in state.get("repeated", ())}',
            "self.repeated = set()",
            "data/test_loader.py::test_row_of_a_repeated_source_counts_once",
        ),
        (
            "data/rejects.py",
            "for line in lines if line.cause in LASTING}",
            "for line in lines if False}",
            "data/test_fetch.py::test_images_that_crash_decoders_are_rejected_alone",
        ),
        (
            "data/loader.py",
            "if at.digest not in (None, made.digest):",
            "if False:",
            "data/test_plan.py::test_a_state_that_forgets_the_carried_bins_is_noticed",
        ),
        (
            "train/stage.py",
            "if checkpoint and state.step > 0:",
            "if checkpoint and state.step > 1:",
            "train/test_resume.py::test_stopped_and_resumed_is_bit_equal",
        ),
        (
            "train/loop.py",
            "factor(stage.schedule, state.step, running.steps)",
            "factor(stage.schedule, state.step + 1, running.steps)",
            "train/test_metrics.py::test_each_step_has_its_rates_and_its_address",
        ),
        (
            "train/loop.py",
            "                step=state.global_step,\n",
            "                step=state.step,\n",
            "train/test_metrics.py::test_each_step_has_its_rates_and_its_address",
        ),
        (
            "train/loop.py",
            ">= 60 * run.save_minutes",
            ">= run.save_minutes",
            "train/test_resume.py::test_checkpoints_by_the_clock_are_where_they_are_due",
        ),
        (
            "train/loop.py",
            "            saved_at = clock.now()\n",
            "",
            "train/test_resume.py::test_checkpoints_by_the_clock_are_where_they_are_due",
        ),
        (
            "data/reader.py",
            "order = [reader.seed, data.mix",
            "order = [data.mix",
            "data/test_plan.py::test_a_state_of_something_else_is_refused_by_name",
        ),
    ],
    "loss": [
        (
            "train/step.py",
            "loss = loss / supervised",
            "loss = loss / batch.counts.supervised",
            "train/test_step.py::test_the_update_does_not_depend_on_how_the_step_is_cut",
        ),
        (
            "train/step.py",
            "total[1] += 0 if here.labels_L is None else len(here.labels_L)",
            "total[1] += len(here.tokens_T)",
            "train/test_step.py::test_validation_is_the_mean_over_all_labels_without_dropout",
        ),
        ("train/step.py", "    model.eval()", "    model.train()", "train/test_step.py::test_validation_turns_dropout_off"),
        (
            "train/step.py",
            "figures = [loss - added - divergence, norm",
            "figures = [loss - divergence, norm",
            "train/test_experts.py::test_the_reported_loss_is_without_what_balances",
        ),
        (
            "kernels/cross_entropy.py",
            "dlogits_RV = dlogits_RV.mul_(wanted_R1 if gain == 1 else wanted_R1 * gain).to(x_LD.dtype)",
            "dlogits_RV = dlogits_RV.to(x_LD.dtype)",
            "kernels/test_cross_entropy.py::test_loss_and_gradients",
        ),
        (
            "train/step.py",
            "balance.coef * batch.counts.supervised * balance_loss(load,",
            "balance.coef * supervised * balance_loss(load,",
            "train/test_experts.py::test_the_auxiliary_loss_moves_weights_by_its_gradient",
        ),
        (
            "data/fetch/batches.py",
            "real_T=torch.arange(slots) < real,",
            "real_T=torch.arange(slots) >= 0,",
            "models/test_moe.py::test_load_counts_real_tokens_of_each_layer",
        ),
        (
            "train/loop.py",
            "            check_rejects_at_end(running.reader, step.state)",
            "            pass",
            "train/test_rejects.py::test_run_whose_every_step_had_no_labels_ends_with_code_3",
        ),
    ],
    "step": [
        (
            "train/step.py",
            "model.zero_grad(set_to_none=True)",
            "pass",
            "train/test_step.py::test_parameters_of_an_earlier_step_are_left_unchanged",
        ),
        (
            "train/step.py",
            "model.zero_grad(set_to_none=True)",
            "model.zero_grad(set_to_none=False)",
            "train/test_step.py::test_parameters_of_an_earlier_step_are_left_unchanged",
        ),
        (
            "train/step.py",
            "        if max_grad_norm:",
            "        if False:",
            "train/test_step.py::test_clipping_bounds_the_gradient_that_is_applied",
        ),
        (
            "train/step.py",
            "        unscale(parameters, loss_scale)",
            "        pass",
            "train/test_loss_scale.py::test_scales_and_updates_are_those_of_grad_scaler",
        ),
        (
            "train/step.py",
            "loss_scale > LEAST and math.isfinite(loss)",
            "math.isfinite(loss)",
            "train/test_loss_scale.py::test_an_overflow_is_no_fault_while_the_scale_can_fall",
        ),
        (
            "train/loss_scale.py",
            "return LossScale(max(self.factor / 2, LEAST), 0)",
            "return LossScale(max(self.factor / 2, LEAST), self.good_steps)",
            "train/test_loss_scale.py::test_scale_halves_doubles_and_stays_at_its_least",
        ),
        (
            "train/loop.py",
            "loss_scale=scale.factor, good_steps=scale.good_steps)",
            "loss_scale=scale.factor)",
            "train/test_loss_scale.py::test_planted_overflow_skips_one_step_and_a_resume_is_bit_for_bit",
        ),
        (
            "train/slices.py",
            "return loss if loss_scale is None else loss * loss_scale",
            "return loss",
            "parallel/test_slices.py::test_slices_together_with_others_update_as_one_process[fp16]",
        ),
        (
            "kernels/float8.py",
            "largest = x_MK.abs().amax() if scaling",
            "largest = x_MK.abs().amax() / 2 if scaling",
            "kernels/test_float8.py::test_output_and_gradients_are_those_of_rounded_operands",
        ),
        (
            "kernels/float8.py",
            "    missing = -a_MK.shape[1] % MULTIPLE",
            "    missing = 0",
            "kernels/test_float8.py::test_rows_are_filled_up_for_torchs_product",
        ),
        (
            "models/float8.py",
            "if module.target in RATES:",
            "if False:",
            "train/test_float8.py::test_rates_of_the_recurrent_state_stay_whatever_their_sizes",
        ),
        (
            "models/layers.py",
            "return None if self.largest is not None or self.float8 is not None else",
            "return None if self.largest is not None else",
            "train/test_float8.py::test_a_gpu_takes_no_other_product_for_these_layers",
        ),
        (
            "kernels/cross_entropy.py",
            "FLOAT16_GAIN = 1024.0",
            "FLOAT16_GAIN = 1.0",
            "kernels/test_cross_entropy.py::test_small_gradients_survive_float16",
        ),
        (
            "train/step.py",
            "(loss.isfinite() & norm.isfinite()).float()",
            "loss.isfinite().float()",
            "train/test_step.py::test_a_step_that_is_not_finite_changes_nothing",
        ),
        (
            "train/step.py",
            "with_draws(seed, step)",
            "with_draws(seed, 0)",
            "train/test_step.py::test_dropout_is_addressed_by_step_and_pack",
        ),
        (
            "core/batch.py",
            "rng_for(seed, purpose, step, self.pack)",
            "rng_for(seed, purpose, step, 0)",
            "train/test_step.py::test_dropout_is_addressed_by_step_and_pack",
        ),
        (
            "models/layers.py",
            "Traits(self.split, decays=False)",
            "Traits(self.split)",
            "train/test_optim.py::test_decay_spares_norms_biases_and_embeddings",
        ),
        (
            "train/muon.py",
            "g.norm(dim=(1, 2), keepdim=True)",
            "g.norm(dim=1, keepdim=True)",
            "train/test_muon.py::test_stacked_matrices_take_the_step_of_torch",
        ),
        (
            "train/muon.py",
            "if p.grad is not None]",
            "if p.grad is not None][:1]",
            "train/test_muon.py::test_stacked_matrices_take_the_step_of_torch",
        ),
        (
            "study/timed_steps.py",
            "flops=packs * sum",
            "flops=sum",
            "study/test_timed_steps.py::test_its_arithmetic_is_that_of_the_roofline",
        ),
        (
            "train/optim.py",
            'rates[group["part"]] * group["ratio"] * factor',
            'rates[group["part"]] * factor',
            "train/test_optim.py::test_rates_follow_part_ratio_and_schedule",
        ),
        (
            "train/schedule.py",
            "return (step + 1) / rising",
            "return step / rising",
            "train/test_schedule.py::test_no_step_is_wasted_or_overshoots",
        ),
        (
            "train/loop.py",
            "over = state.not_finite > run.max_nonfinite_steps",
            "over = False",
            "train/test_resume.py::test_steps_that_are_not_finite_end_the_run_with_evidence",
        ),
    ],
    "ranks": [
        (
            "models/moe.py",
            "load_E = sum_of_pack(load.tokens_NE)",
            "load_E = load.tokens_NE",
            "models/test_moe.py::test_ranks_that_share_a_pack_add_up_to_its_auxiliary_loss",
        ),
        (
            "kernels/attention.py",
            "return q_THK + (k_TGK.sum() + v_TGK.sum())",
            "return q_THK.clone()",
            "kernels/test_attention.py::test_no_rows_have_gradients_of_zeros_on_a_gpu_too",
        ),
        (
            "train/step.py",
            "supervised, device = data.counts.supervised,",
            "supervised, device = sum(batch.counts.supervised for batch in data.batches),",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "train/step.py",
            "else ranks.norm(parameters).to",
            "else torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).to",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "train/step.py",
            "    ranks.sum_gradients(parameters)\n",
            "",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "train/step.py",
            "enumerate(data.slots) if slot.counts.supervised]",
            "enumerate(data.slots) if data.batches[i].counts.supervised]",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[text]",
        ),
        (
            "train/step.py",
            "ranks.sum(sums.tokens_NE)",
            "sums.tokens_NE",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[qwen3_vl-bias]",
        ),
        (
            "train/step.py",
            "load.tokens_NE * (batch.counts.supervised > 0)",
            "load.tokens_NE",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[qwen3_vl-bias]",
        ),
        (
            "train/step.py",
            "ranks.sum(torch.stack([sums.loss, sums.added, sums.divergence]))",
            "torch.stack([sums.loss, sums.added, sums.divergence])",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[qwen3_vl-aux]",
        ),
        (
            "train/step.py",
            "loss, labels = ranks.sum(total).tolist()",
            "loss, labels = total.tolist()",
            "train/test_global_step.py::test_validation_on_two_ranks_is_that_on_one",
        ),
        (
            "models/llava.py",
            "        if batch.has_images:",
            "        if len(batch.patches_PC):",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "models/qwen_vl.py",
            "        if batch.has_images:",
            "        if len(batch.patches_PC):",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[qwen3_vl]",
        ),
        (
            "models/llava.py",
            "set_grad_enabled(batch.image_gradients and",
            "set_grad_enabled(batch.has_images and",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "models/qwen_vl.py",
            "set_grad_enabled(batch.image_gradients and",
            "set_grad_enabled(batch.has_images and",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[qwen3_vl]",
        ),
        (
            "core/step.py",
            "any(c.patches and c.supervised for c in of_ranks)",
            "any(c.patches for c in of_ranks)",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[llava]",
        ),
        (
            "core/step.py",
            "zip(batches, packs, slots, strict=True)",
            "zip(batches, range(len(packs)), slots, strict=True)",
            "train/test_global_step.py::test_update_on_two_ranks_is_that_on_one[text]",
        ),
        (
            "data/loader.py",
            "packs, sharing = [slot[reader.world.rank] for slot in dealt],",
            "packs, sharing = range(len(dealt)),",
            "data/test_promises.py::test_processes_that_wait_for_one_another_have_as_many_steps",
        ),
        (
            "data/loader.py",
            "[list(astuple(batch.counts)) for batch in batches]",
            "[list(astuple(batches[0].counts)) for batch in batches]",
            "data/test_promises.py::test_processes_that_wait_for_one_another_have_as_many_steps",
        ),
        (
            "data/validation.py",
            "mine = slot[rank] if rank < len(slot) else []",
            "mine = slot[rank % len(slot)]",
            "data/test_plan.py::test_validation_is_cut_between_ranks_and_complete",
        ),
        (
            "data/validation.py",
            "yield replace(fetched.batch, has_images=has_images)",
            "yield fetched.batch",
            "data/test_plan.py::test_validation_is_cut_between_ranks_and_complete",
        ),
    ],
    "what trains": [
        (
            "models/shape.py",
            "requires_grad=entry.trains",
            "requires_grad=True",
            "models/test_shape.py::test_every_tensor_has_one_entry_that_fits_it",
        ),
        (
            "models/shape.py",
            "and not kept and tensor.ndim > 1",
            "and tensor.ndim > 1",
            "models/test_shape.py::test_narrow_parts_store_frozen_matrices_in_the_dtype_that_they_compute_in",
        ),
        (
            "bundle/fill.py",
            "None if keep_adapters else updates.get(name)",
            "None",
            "train/test_trainable.py::test_stage_border_merges_adapters_that_do_not_continue",
        ),
        (
            "bundle/fill.py",
            "layer.initialise_adapter(rng)",
            "pass",
            "train/test_trainable.py::test_fresh_adapters_have_the_seed_of_their_part",
        ),
        (
            "models/shape.py",
            'traits.role == "weight" and not traits.exact',
            'traits.role == "weight"',
            "models/test_build.py::test_weights_cast_once_give_the_same_bits",
        ),
        (
            "models/shape.py",
            "partial=traits.split is None and any(",
            "partial=any(",
            "models/test_shape.py::test_splits_say_what_tensor_parallelism_needs",
        ),
        (
            "models/lora.py",
            "a, b = (self.split, None) if self.split == INPUTS else (None, self.split)",
            "a, b = None, self.split",
            "models/test_shape.py::test_splits_say_what_tensor_parallelism_needs",
        ),
        (
            "core/plan.py",
            "setattr(plan.model.get_submodule(path), leaf, tensor_of(plan.model, entry.tied_to))",
            "pass",
            "models/test_shape.py::test_ties_hold_where_memory_is_given",
        ),
        (
            "checkpoint/pieces.py",
            "if box.common(other):",
            "if False:",
            "checkpoint/test_pieces.py::test_boxes_by_hand",
        ),
        (
            "models/lora.py",
            "lora.scale, lora.dropout, lora.rslora",
            "lora.alpha, lora.dropout, False",
            "models/test_lora.py::test_equals_peft",
        ),
        ("models/lora.py", "self.rank**0.5 if self.rslora", "self.rank if self.rslora", "models/test_lora.py::test_equals_peft"),
        (
            "models/lora.py",
            "self.lengths(merge(self.weight, self.lora_A",
            "self.lengths(merge(self.weight, 0 * self.lora_A",
            "models/test_lora.py::test_equals_peft",
        ),
        (
            "bundle/fill.py",
            'if leaf == "new_rows" and name not in filled:',
            'if leaf == "new_rows":',
            "train/test_new_tokens.py::test_a_stopped_run_resumes_to_the_same_bits",
        ),
        (
            "bundle/fill.py",
            "with_rows(x_VD[: source.known_rows], rows)",
            "with_rows(x_VD, rows)",
            "train/test_new_tokens.py::test_rows_start_at_the_mean_and_only_they_train_with_lora",
        ),
        (
            "bundle/exporting.py",
            "and layer.new_rows is not None:",
            "and False:",
            "train/test_new_tokens.py::test_transformers_and_peft_compute_the_same",
        ),
        (
            "kernels/kept.py",
            "if kept.untyped_storage()._cdata != memory:",
            "if True:",
            "models/test_batches.py::test_a_copy_on_the_host_is_what_autograd_keeps",
        ),
        (
            "train/memory.py",
            "if _address(x) not in given:",
            "if True:",
            "train/test_memory.py::test_bytes_at_once_by_hand",
        ),
        (
            "kernels/rounding.py",
            "+ chance_N)",
            "+ 0x8000)",
            "train/test_small_adamw.py::test_changes_below_the_last_bit_add_up",
        ),
        (
            "train/small_adamw.py",
            'of {name}", number)',
            'of {name}", id(self))',
            "train/test_small_adamw.py::test_stopped_run_resumes_to_the_same_bits",
        ),
        (
            "kernels/dynamic8.py",
            "        code_NBK += (code_NBK == 0) & (x_NBK > 0)\n",
            "        pass\n",
            "train/test_adamw_8bit.py::test_weight_without_gradient_is_not_thrown_far",
        ),
        (
            "kernels/dynamic8.py",
            "(levels(signed, device)[:-1] + levels(signed, device)[1:]) / 2",
            "levels(signed, device)[1:]",
            "kernels/test_dynamic8.py::test_each_number_becomes_the_nearest_level_of_its_block[True]",
        ),
        (
            "train/small_adamw.py",
            "return [first[0], second[0], first[1], second[1]]",
            "return [first[0], second[0], second[1], first[1]]",
            "train/test_adamw_8bit.py::test_moments_of_matrices_are_in_8_bits_and_near_float32[False]",
        ),
        (
            "train/optim.py",
            'part.local.copy_(stored.read(f"{name}:{key}", part.box))',
            'part.local.copy_(0 * stored.read(f"{name}:{key}", part.box))',
            "train/test_adamw_8bit.py::test_stopped_run_resumes_to_the_same_bits",
        ),
        (
            "train/in_backward.py",
            "    parameter.grad = None\n",
            "",
            "train/test_in_backward.py::test_gradients_of_one_block_at_most_exist_at_once",
        ),
        (
            "train/in_backward.py",
            "            hook.remove()",
            "            pass",
            "train/test_in_backward.py::test_gradients_of_one_block_at_most_exist_at_once",
        ),
        (
            "train/in_backward.py",
            "if not finite and updates_in_backward",
            "if False and updates_in_backward",
            "train/test_in_backward.py::test_step_that_is_not_finite_stops_the_run_unsaved",
        ),
        (
            "train/memory.py",
            "max(gradients.values(), default=0) if",
            "gradients.total() if",
            "train/test_in_backward.py::test_gradients_of_one_block_at_most_exist_at_once",
        ),
        (
            "train/memory.py",
            "return 2 * round(bytes_in_8_bits(shape) * share)",
            "return 2 * round(math.prod(shape) * share)",
            "train/test_adamw_8bit.py::test_memory_counts_what_the_optimizer_keeps",
        ),
        (
            "core/shards.py",
            "place_N + math.prod(shape[1:]) *",
            "place_N + 0 *",
            "train/test_small_adamw.py::test_sharded_parameters_take_the_step_of_one_device",
        ),
        (
            "core/shards.py",
            "(rest_N % length + first) * stride",
            "(rest_N % length) * stride",
            "parallel/test_axis_optimizers.py::test_cut_parameters_take_the_step_of_one_device[fsdp x tp x ep]",
        ),
        (
            "kernels/cross_entropy.py",
            "            dlogits_RV[:, apart] = 0\n",
            "",
            "kernels/test_cross_entropy.py::test_rows_apart_take_the_place_of_the_weights",
        ),
        (
            "models/shape.py",
            "any(one.cover(first) for one in (ways, *later))",
            "ways.cover(first)",
            "train/test_trainable.py::test_what_a_later_stage_trains_is_not_rounded_before",
        ),
        (
            "models/layers.py",
            "if self.blocks is not None and block not in self.blocks:",
            "if not self.blocks and self.blocks is not None:",
            "models/test_batches.py::test_some_blocks_or_cheap_activations_recomputed_change_nothing",
        ),
        (
            "models/lora.py",
            "weight_OI.float() + scale * (b_Or",
            "weight_OI.float() + (b_Or",
            "models/test_lora.py::test_merged_model_gives_the_same_logits_and_has_no_adapters",
        ),
        (
            "models/lora.py",
            "if self.training and self.dropout:\n            assert",
            "if self.dropout:\n            assert",
            "models/test_lora.py::test_dropout_is_of_the_adapters_input_in_training_only",
        ),
        (
            "models/lora.py",
            "torch.tensor(seed_for(0, name), device",
            'torch.tensor(seed_for(0, name.rsplit(".")[-1]), device',
            "models/test_lora.py::test_layers_and_packs_drop_differently_and_rows_of_a_cut_alike",
        ),
        (
            "models/qwen3_5.py",
            "-1, self.J))).flatten(1), draws_T2)",
            "-1, self.J))).flatten(1), draws_T2.flip(0) if draws_T2 is not None else None)",
            "models/test_lora.py::test_every_adapter_is_given_draws_of_its_rows",
        ),
        (
            "kernels/dropout.py",
            "hashed_D = ((hashed_D ^ (hashed_D >> 32)) * odd >> 32).int()",
            "hashed_D = (hashed_D >> 32).int()",
            "kernels/test_dropout.py::test_entries_do_not_depend_on_one_another",
        ),
        (
            "train/start.py",
            "return replace(bundle, untrained=left)",
            "return bundle",
            "recipes/test_check.py::test_check_names_the_control_tokens_that_nothing_has_trained",
        ),
    ],
    "memory": [
        (
            "train/auto_batch.py",
            "one.memory.total <= room]",
            "one.memory.total <= 2 * room]",
            "train/test_auto_batch.py::test_largest_packs_that_fit_are_taken",
        ),
        (
            "train/start.py",
            "if not recipe.exists() or _untouched(folder):\n        return {}",
            "if True:\n        return {}",
            "train/test_auto_batch.py::test_resumed_run_takes_what_its_folder_has",
        ),
        (
            "bundle/peft_adapter.py",
            'return alpha / (rank**0.5 if settings.get("use_rslora") else rank)',
            "return alpha / rank",
            "bundle/test_peft_adapter.py::test_model_with_an_adapter_computes_what_peft_computes",
        ),
        (
            "bundle/peft_adapter.py",
            "one.key.read(b_Or)[one.output]",
            "one.key.read(b_Or)[0]",
            "bundle/test_families.py::test_adapter_of_peft_is_taken",
        ),
        (
            "bundle/peft_adapter.py",
            "unflatten(1, (one.rank, one.experts)).permute(2, 0, 1)",
            "unflatten(1, (one.experts, one.rank)).permute(1, 0, 2)",
            "bundle/test_families.py::test_adapters_of_experts_go_through_peft",
        ),
        (
            "models/lora.py",
            "ends_E) + update * self.scale",
            "ends_E) + update",
            "models/test_lora_experts.py::test_adapted_experts_are_each_experts_own_product",
        ),
        (
            "kernels/moe.py",
            "_gradient(dout_NF, x_ND, ends_E) if weight_needed",
            "_gradient(dout_NF, x_ND, ends_E) * 2 if weight_needed",
            "models/test_lora_experts.py::test_grouped_product_is_each_experts_own",
        ),
        (
            "bundle/fill.py",
            "if same and update is None else",
            "if False else",
            "train/test_qlora.py::test_scales_in_8_bits_resume_as_they_are_and_export",
        ),
        (
            "kernels/nf4.py",
            " + floats[0]).view(rows",
            ").view(rows",
            "kernels/test_nf4.py::test_doubled_scales_are_near_and_a_byte_each",
        ),
        (
            "kernels/nf4.py",
            "(levels[1:] + levels[:-1]) / 2",
            "levels[1:]",
            "kernels/test_nf4.py::test_each_number_becomes_the_nearest_level",
        ),
        (
            "bundle/fill.py",
            "stored.read(update.b), update.scale, magnitude_O)",
            "stored.read(update.b), 1.0, magnitude_O)",
            "train/test_qlora.py::test_export_merges_into_the_weights_that_were_trained_on",
        ),
        (
            "models/layers.py",
            "out_TO = nf4_linear(x_TD, self.weight, self.largest)",
            "out_TO = nf4_linear(x_TD, self.weight, self.largest * 1.01)",
            "train/test_qlora.py::test_export_merges_into_the_weights_that_were_trained_on",
        ),
        (
            "recipes/read.py",
            "if place in given:",
            "if False:",
            "recipes/test_read.py::test_setting_that_is_given_twice_is_refused",
        ),
    ],
    "models": [
        (
            "kernels/rope.py",
            "positions_T3.float()[:, by_row_R2 + 2 * by_column_R2]",
            "positions_T3.float()[:, 2 * by_row_R2 + by_column_R2]",
            "kernels/test_rope.py::test_interleaved_sections_are_those_of_qwen3_vl",
        ),
        (
            "kernels/rope.py",
            "_turned(gradients[0], cos_TR, -sin_TR)",
            "_turned(gradients[0], cos_TR, sin_TR)",
            "kernels/test_rope.py::test_gradient_is_that_of_the_formula",
        ),
        (
            "models/decoder.py",
            "layout = Layout(cos_TR, sin_TR, batch.cu_S1,",
            "layout = Layout(cos_TR, sin_TR, batch.cu_S1[[0, -1]],",
            "models/test_batches.py::test_documents_do_not_see_one_another",
        ),
        (
            "models/decoder.py",
            "cast(nn.Parameter, self.embed.weight)  #",
            "nn.Parameter(self.embed.weight.detach().clone())  #",
            "models/test_build.py::test_tied_head_is_the_embedding_however_the_model_is_made",
        ),
        (
            "models/decoder.py",
            "if i < len(deep_MD):",
            "if i + 1 < len(deep_MD):",
            "models/test_parity.py::test_packed_batch_equals_the_reference_one_by_one",
        ),
        (
            "models/llava.py",
            "visual_MD = self.projector(features_PD, batch.draws_P2)[batch.sources_M]",
            "visual_MD = self.projector(features_PD, batch.draws_P2)[: len(batch.sources_M)]",
            "models/test_batches.py::test_shared_image_equals_own_copies",
        ),
        (
            "models/moe.py",
            "(load_E.mean() - load_E).sign()",
            "(load_E - load_E.mean()).sign()",
            "models/test_moe.py::test_biases_bring_loads_to_the_mean",
        ),
        (
            "kernels/causal_conv.py",
            "return [(age_T[j:] >= j)[:, None]",
            "return [(age_T[j:] >= 0)[:, None]",
            "kernels/test_causal_conv.py::test_output_and_gradients",
        ),
    ],
    "checkpoints": [
        (
            "checkpoint/store.py",
            "if got != want.sha256:",
            "if False:",
            "checkpoint/test_store.py::test_any_damage_is_named_and_the_one_before_is_used",
        ),
        (
            "checkpoint/store.py",
            'if path.name != f"step-',
            'if False and path.name != f"step-',
            "checkpoint/test_store.py::test_files_of_different_saves_never_mix",
        ),
        (
            "checkpoint/store.py",
            "if text != _render(manifest):",
            "if False:",
            "checkpoint/test_store.py::test_edited_manifest_is_refused",
        ),
        (
            "checkpoint/store.py",
            "    stay += [path for path, manifest in have if manifest.best][:1]\n",
            "",
            "checkpoint/test_store.py::test_pruning_keeps_the_last_few_and_the_newest_best",
        ),
        (
            "checkpoint/store.py",
            "sorted(marked, key=lambda c: -c[1].order)",
            "sorted(marked, key=lambda c: -c[1].step)",
            "checkpoint/test_store.py::test_the_newest_is_the_last_saved_whatever_its_name_or_step",
        ),
        (
            "checkpoint/store.py",
            "intact = sha256_of(folder / file) == manifest.files[file].sha256",
            "intact = True",
            "checkpoint/test_store.py::test_a_damaged_fixed_file_does_not_spread",
        ),
        (
            "core/files.py",
            "        os.replace(temporary, path)\n        if durable:",
            "        path.write_bytes(data)\n        lock.unlink()\n        if durable:",
            "core/test_files.py::test_who_reads_a_file_that_is_replaced_reads_the_old_one",
        ),
        (
            "train/stop.py",
            "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "",
            "train/test_resume.py::test_a_second_process_is_locked_out",
        ),
        (
            "train/saving.py",
            '"without_state": [] if ended else without,',
            '"without_state": [],',
            "train/test_resume.py::test_run_whose_tower_no_step_has_used_resumes_bit_for_bit",
        ),
        (
            "checkpoint/store.py",
            "held = _open_locked(path, fcntl.LOCK_SH) if hold else None",
            "held = None",
            "checkpoint/test_store.py::test_a_checkpoint_that_is_read_is_not_deleted",
        ),
    ],
    "folders": [
        (
            "bundle/bundle.py",
            "    if version == VERSION:",
            "    if version in (1, VERSION):",
            "bundle/test_bundle.py::test_a_broken_description_is_refused_by_name",
        ),
        ("models/hf/qwen3_5.py", "range(1, 9))", "range(1, 3))", "models/test_qwen3_5.py::test_second_token_predictor_is_dropped"),
        (
            "models/hf/config_json.py",
            'for key in ("quantization_config", "compression_config", "quantization"):',
            'for key in ("compression_config", "quantization"):',
            "models/test_hf_config.py::test_a_quantised_checkpoint_is_refused_by_its_name",
        ),
        (
            "models/hf/llava.py",
            '"up": "linear_1", "down": "linear_2"',
            '"up": "linear_2", "down": "linear_1"',
            "bundle/test_exporting.py::test_transformers_computes_the_same_and_exports_are_stable",
        ),
        (
            "models/lora.py",
            "detach(), a_rI, b_Or, update.scale, magnitude_O)",
            "detach(), a_rI, b_Or, 1.0, magnitude_O)",
            "bundle/test_exporting.py::test_export_merges_adapters_and_keeps_them_on_the_model",
        ),
        (
            "bundle/rows.py",
            "mean_D = x_VD.float().mean(0).to(x_VD.dtype)",
            "mean_D = x_VD[0]",
            "bundle/test_importing.py::test_a_vocabulary_without_free_rows_grows_by_means",
        ),
    ],
    "offline": [
        (
            "offline/attempt.py",
            "    standing = standing or commit(store, ours)\n",
            "    try:\n        standing = standing or commit(store, ours)\n"
            "    except StorageFailed:\n        drop(store, folder)\n        raise\n",
            "offline/test_exactly_once.py::test_a_fault_at_every_border_of_a_partition",
        ),
        (
            "offline/manifests.py",
            'not in ("", attempt)',
            "!= attempt",
            "offline/test_store.py::test_what_a_lost_attempt_leaves_is_named",
        ),
        (
            "offline/manifests.py",
            "    if len(committed_numbers(store, group)) < len(plan.numbers(group)):\n        return False\n",
            "",
            "offline/test_run.py::test_every_mode_writes_the_same_with_a_worker_killed",
        ),
        (
            "offline/plan.py",
            "    if store.create(HEAD, head):\n        return head\n",
            "    store.create(HEAD, head)\n    return head\n",
            "offline/test_exactly_once.py::test_any_schedule_of_racing_workers",
        ),
        (
            "offline/attempt.py",
            "    if job.repeatable and (standing.outputs, standing.counts) != (outputs, done.counts):",
            "    if False:",
            "offline/test_run.py::test_what_is_damaged_is_written_again_with_the_same_manifest",
        ),
        (
            "offline/store.py",
            "            os.link(temporary, path)",
            "            os.replace(temporary, path)",
            "offline/test_store.py::test_a_key_is_created_once_and_moved_and_removed",
        ),
        (
            "offline/run.py",
            "number % self.shards == self.shard",
            "number % self.shards <= self.shard",
            "offline/test_run.py::test_shares_are_disjoint_and_complete",
        ),
    ],
    "where": [
        (
            "data/plan/blend.py",
            "            left_out += self.side.left_out(source, shard) if cursor.epoch == 0 and self._first_N[n] else 0\n",
            "            left_out += self.side.left_out(source, shard) if cursor.epoch == 0 else 0\n",
            "offline/test_choosing.py::test_batches_are_those_of_rows_chosen_by_category",
        ),
        (
            "data/plan/blend.py",
            "if self.cursor.group == 0 else 0",
            "if True else 0",
            "offline/test_choosing.py::test_resuming_at_any_step_counts_and_gives_the_same",
        ),
        (
            "data/plan/plan.py",
            "0 if start else self.left_out",
            "self.left_out",
            "offline/test_choosing.py::test_resuming_at_any_step_counts_and_gives_the_same",
        ),
        (
            "data/signals/chosen.py",
            " | ~table[USABLE]",
            "",
            "offline/test_choosing.py::test_batches_are_those_of_rows_chosen_by_category",
        ),
        (
            "data/signals/where.py",
            "COMPARISONS[type(op)](value, other) & _there(value) & _there(other)",
            "COMPARISONS[type(op)](value, other)",
            "data/test_where.py::test_rows_by_hand",
        ),
    ],
    "signals": [
        (
            "models/two_towers.py",
            "(M, T))[:, -1]",
            "(M, T))[:, 0]",
            "offline/test_similarity.py::test_vectors_are_those_of_transformers",
        ),
        (
            "offline/similarity.py",
            ".min()), DIGITS",
            ".max()), DIGITS",
            "offline/test_similarity.py::test_vectors_are_those_of_transformers",
        ),
        (
            "offline/signals.py",
            "if key not in whole or not same_scores:",
            "if key not in whole:",
            "offline/test_similarity.py::test_similarity_is_added_to_signals_that_are_there",
        ),
        (
            "data/sets.py",
            "_shortest_above(least[count - 1], least[count])",
            "_shortest_above(least[count], 1.0)",
            "data/test_loader.py::test_advised_validation_fraction_holds_out_so_many_images",
        ),
        (
            "offline/alike.py",
            "row_N[later_M] != row_N[earlier_M]",
            "row_N[later_M] >= row_N[earlier_M]",
            "offline/test_alike.py::test_links_are_those_of_comparing_all_with_all",
        ),
        (
            "offline/alike.py",
            "for back in range(1, min(NEIGHBOURS",
            "for back in range(2, min(NEIGHBOURS",
            "offline/test_alike.py::test_links_are_those_of_comparing_all_with_all",
        ),
        (
            "offline/hashes.py",
            "if len(words) <= SHORT_ANSWER else",
            "if False else",
            "offline/test_alike.py::test_short_answers_have_to_be_equal",
        ),
        (
            "offline/signals.py",
            "work_of[first >> ROW_BITS]",
            "work_of[0]",
            "offline/test_signals.py::test_columns_by_hand",
        ),
        (
            "offline/signals.py",
            '(max if name == "aspect" else min)',
            "max",
            "offline/test_signals.py::test_columns_by_hand",
        ),
    ],
    "prepared": [
        (
            "data/files/stores.py",
            "return known.data[start - known.start : start - known.start + wanted]",
            "return known.data[:wanted]",
            "data/test_contract.py::test_data_in_a_store_are_the_same",
        ),
        (
            "data/workers.py",
            "number, self.taken = self.taken, self.taken + 1",
            "number, self.taken = min(self.taken ^ 1, self.submitted - 1), self.taken + 1",
            "data/test_contract.py::test_workers_and_indexes_change_nothing",
        ),
        (
            "data/prepared/folder.py",
            "(self.ends[archive - 1] if archive else 0)",
            "0",
            "data/test_contract.py::test_prepared_data_are_the_same",
        ),
        (
            "offline/stored_indexes.py",
            "archive_N[from_N], lies_N4[from_N])",
            "archive_N, lies_N4[from_N])",
            "data/test_contract.py::test_prepared_data_are_the_same",
        ),
        ("data/prepared/folder.py", 'm.get("loss", True)', "True", "data/test_marks.py::test_an_archive_of_prepared_data_keeps_the_mark"),
        (
            "data/prepared/folder.py",
            "        if differs:\n",
            "        if False:\n",
            "data/test_prepare.py::test_other_settings_are_refused_by_name",
        ),
        (
            "data/prepared/folder.py",
            "file.size != archive.bytes or (small and",
            "file.size != archive.bytes or (False and",
            "data/test_prepare.py::test_damage_is_noticed_and_repaired",
        ),
        (
            "data/prepared/folder.py",
            "if window < len(stored) and stored[window] != digest:",
            "if False:",
            "data/test_prepare.py::test_an_index_of_another_plan_is_noticed",
        ),
    ],
    "saving": [
        (
            "train/saving.py",
            '"step": 0, "data": None',
            '"step": state.step, "data": None',
            "train/test_resume.py::test_stopped_and_resumed_is_bit_equal",
        ),
        (
            "train/saving.py",
            'piece.local.detach().to("cpu", copy=True)',
            "piece.local.detach()",
            "train/test_saving.py::test_what_is_written_meanwhile_is_what_was_there_when_it_was_due",
        ),
        (
            "train/saving.py",
            "            future.set_exception(error)",
            "            future.cancel()",
            "train/test_saving.py::test_what_a_thread_could_not_write_ends_the_run",
        ),
        (
            "train/loop.py",
            "            process.saving.abandon(world.first)\n",
            "",
            "train/test_saving.py::test_a_run_that_fails_leaves_no_half_checkpoint",
        ),
    ],
    "axes": [
        (
            "parallel/pieces.py",
            "register_forward_hook(leave, always_call=True)",
            "register_forward_hook(leave)",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp gradient checkpointing]",
        ),
        (
            "parallel/pieces.py",
            "return [Partial()] if",
            "return [Replicate()] if",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp adapters]",
        ),
        (
            "parallel/tensor.py",
            "module.first_input = mesh.pack_rank[1] *",
            "module.first_input = 0 *",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp adapters]",
        ),
        (
            "parallel/context.py",
            "own = [kernel.chunk(n)[rank] for",
            "own = [kernel.chunk(n)[0] for",
            "parallel/test_axes.py::test_an_axis_of_two_updates_as_one_process[qwen3_5_vl-cp]",
        ),
        (
            "parallel/ranks.py",
            "sum_of_pack=_same if pack is None else lambda x: total(x, pack),",
            "sum_of_pack=_same,",
            "parallel/test_axes.py::test_an_axis_of_two_updates_as_one_process[qwen3_vl-moe-tp]",
        ),
        (
            "parallel/ranks.py",
            "        _sum_all(cut, lambda x: total(x, same_piece))\n",
            "",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[cp x tp x ep]",
        ),
        (
            "parallel/rows.py",
            "rows_L=batch.rows_L[wanted] - start",
            "rows_L=batch.rows_L[wanted]",
            "parallel/test_axes.py::test_an_axis_of_two_updates_as_one_process[text-cp]",
        ),
        (
            "parallel/images.py",
            "encoder if encoder // sharing == of else of * sharing + encoder % sharing",
            "encoder",
            "parallel/test_images.py::test_images_arrive_at_their_encoders_and_come_back_in_order[2]",
        ),
        (
            "parallel/vocabulary.py",
            "(of_ranks[:, 0] - top_R).exp()",
            "1",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp, vocabulary]",
        ),
        (
            "parallel/vocabulary.py",
            "p_Rv.scatter_add_(1, at_R1, -here_R[:, None].to(p_Rv.dtype))",
            "p_Rv.scatter_add_(1, at_R1, -wanted_R[:, None].to(p_Rv.dtype))",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp, vocabulary]",
        ),
        (
            "train/loop.py",
            "        counted = flops.NONE\n",
            "        pass\n",
            "parallel/test_ranks_train.py::test_ranks_that_share_packs_train_what_one_process_does[mesh.cp=2]",
        ),
    ],
    "slices": [
        (
            "parallel/pipeline.py",
            "            own += theirs\n",
            "            pass\n",
            "parallel/test_slices.py::test_two_slices_update_as_one_process[text]",
        ),
        (
            "parallel/pipeline.py",
            "return not any(tensor_of(self.plan.model, name) is p",
            "return True or not any(tensor_of(self.plan.model, name) is p",
            "parallel/test_slices.py::test_two_slices_update_as_one_process[text]",
        ),
        (
            "parallel/pipeline.py",
            "        return square.sqrt()",
            "        return own.float()",
            "parallel/test_slices.py::test_two_slices_update_as_one_process[llava]",
        ),
        (
            "parallel/pipeline.py",
            "total_2E = total_2E + torch.stack([load_E.float(), mass_E])",
            "total_2E = total_2E + torch.stack([load_E.float(), mass_E.detach()])",
            "parallel/test_slices.py::test_two_slices_update_as_one_process[qwen3_vl-moe]",
        ),
        (
            "train/step.py",
            "tokens_NE[ranks.pipeline.own_moe_layers]",
            "tokens_NE[: len(ranks.pipeline.own_moe_layers)]",
            "parallel/test_slices.py::test_two_slices_update_as_one_process[qwen3_5_vl-moe]",
        ),
        (
            "train/slices.py",
            "    deep = 0 if plan.spec.vision is None else plan.spec.vision.deepstack\n    return",
            "    deep = 0\n    return",
            "parallel/test_slices.py::test_interleaved_slices_update_as_one_process[qwen3_vl]",
        ),
        (
            "train/slices.py",
            "lambda n: ranks.sum_next(model, ended[running[n]])",
            "lambda n: ranks.sum_next(model, ())",
            "parallel/test_slices.py::test_slices_sum_gradients_once_per_step_where_it_is_asked",
        ),
        (
            "train/saving.py",
            "        if name not in running.plan.copies:\n",
            "        if True:\n",
            "parallel/test_ranks_train.py::test_ranks_that_share_packs_train_what_one_process_does[mesh.pp=2]",
        ),
        (
            "core/plan.py",
            "            setattr(plan.model.get_submodule(path), leaf, tensor_of(plan.model, here))\n    try:",
            "            pass\n    try:",
            "parallel/test_slices.py::test_slices_start_from_the_weights_that_one_process_draws",
        ),
    ],
    "sharding": [
        (
            "parallel/shard.py",
            "            module.set_gradient_divide_factor(1.0)\n",
            "",
            "parallel/test_sharded_update.py::test_two_ranks_update_as_one[fsdp-llava]",
        ),
        (
            "parallel/shard.py",
            '"ignored_params": whole}',
            '"ignored_params": set()}',
            "parallel/test_sharded_update.py::test_a_rank_holds_its_share",
        ),
        (
            "parallel/shard.py",
            "torch.float32, cast_forward_inputs=False)",
            "torch.float32)",
            "parallel/test_sharded_update.py::test_ranks_update_as_one[qwen3_vl-bf16]",
        ),
        (
            "parallel/ranks.py",
            "    if not gradients:\n",
            "    if gradients:\n",
            "parallel/test_sharded_update.py::test_two_ranks_update_as_one[fsdp-llava]",
        ),
        (
            "parallel/ranks.py",
            "return [*found.values()]",
            "return [*found.values()][:1]",
            "parallel/test_sharded_update.py::test_two_ranks_update_as_one[fsdp-text]",
        ),
        (
            "parallel/muon.py",
            "momentum.lerp_(gradient, 1 -",
            "momentum.lerp_(gradient, 1.05 -",
            "parallel/test_muon.py::test_sharded_matrices_take_the_step_of_one_device",
        ),
        (
            "parallel/muon.py",
            "for _, boxes in wholes]",
            "for _, boxes in wholes[::-1]]",
            "parallel/test_muon.py::test_sharded_matrices_take_the_step_of_one_device",
        ),
        (
            "parallel/tensor.py",
            "length_O.square(), self.ranks).sqrt()",
            "length_O, self.ranks)",
            "parallel/test_axes.py::test_axes_together_update_as_one_process[tp DoRA]",
        ),
        (
            "checkpoint/pieces.py",
            "writes = replica == 0 if",
            "writes = True if",
            "parallel/test_ranks_train.py::test_ranks_train_what_one_process_does",
        ),
        (
            "train/optim.py",
            'part.local.copy_(stored.read(f"{name}:{key}", part.box))',
            "part.local.zero_()",
            "parallel/test_ranks_train.py::test_a_run_resumed_on_as_many_ranks_is_the_uninterrupted_one",
        ),
    ],
    "memory of a rank": [
        (
            "parallel/shares.py",
            "shape[0] //= self.sizes.ep",
            "pass",
            "parallel/test_fake_worlds.py::test_memory_of_a_rank_is_counted_as_it_holds_it",
        ),
        (
            "parallel/shares.py",
            "shape[entry.split.dim] //= tp",
            "pass",
            "parallel/test_fake_worlds.py::test_memory_of_a_rank_is_counted_as_it_holds_it",
        ),
        (
            "parallel/shares.py",
            "1 if entry.exact else self.ranks // tp",
            "1 if entry.exact else self.ranks",
            "parallel/test_fake_worlds.py::test_memory_of_a_rank_is_counted_as_it_holds_it",
        ),
        (
            "train/memory.py",
            "round(x.numel() * of_gradient) * entry.stored.itemsize if",
            "x.numel() * entry.stored.itemsize if",
            "parallel/test_fake_worlds.py::test_memory_of_a_rank_is_counted_as_it_holds_it",
        ),
    ],
    "gathered ahead": [
        (
            "parallel/mesh.py",
            "if count is not None and (world == 1 or whole):",
            "if count is not None and world == 1:",
            "parallel/test_fake_worlds.py::test_prefetch_is_refused_where_nothing_is_gathered",
        ),
        (
            "parallel/prefetch.py",
            "[*own, *chain(*blocks[i + 1 : i + 1 + sizes.forward_prefetch])]",
            "[block for block, *_ in blocks[i + 1 : i + 1 + sizes.forward_prefetch]]",
            "parallel/test_fake_worlds.py::test_blocks_and_their_experts_are_gathered_ahead",
        ),
        (
            "parallel/prefetch.py",
            "chain(*reversed(before))",
            "chain(*before)",
            "parallel/test_fake_worlds.py::test_blocks_and_their_experts_are_gathered_ahead",
        ),
        (
            "parallel/prefetch.py",
            "before = blocks[max(0, i - sizes.backward_prefetch) : i]",
            "before = blocks[i : i + sizes.backward_prefetch]",
            "parallel/test_fake_worlds.py::test_blocks_and_their_experts_are_gathered_ahead",
        ),
    ],
    "many ranks": [
        (
            "parallel/shard.py",
            "    for modules in units(plan):",
            "    for modules in units(plan)[:0]:",
            "parallel/test_sharded_update.py::test_a_rank_holds_its_share",
        ),
        (
            "checkpoint/pieces.py",
            "if writes and (box.size or",
            "if writes and (any(box.offset) or",
            "parallel/test_ranks_train.py::test_ranks_train_what_one_process_does",
        ),
        (
            "parallel/shard.py",
            '"reshard_after_forward": mesh.reshard,',
            '"reshard_after_forward": False,',
            "parallel/test_fake_worlds.py::test_collectives_of_a_step_are_those_counted_by_hand[64]",
        ),
        (
            "parallel/shard.py",
            "MixedPrecisionPolicy(compute, torch.float32,",
            "MixedPrecisionPolicy(compute, compute,",
            "parallel/test_fake_worlds.py::test_collectives_of_a_step_are_those_counted_by_hand",
        ),
        (
            "generate/generate.py",
            "        if not anywhere(bool(alive)):",
            "        if not alive:",
            "parallel/test_ranks_eval.py::test_sharded_ranks_answer_as_one_process",
        ),
        (
            "evals/exact_match.py",
            "slot[world.rank] if world.rank < len(slot)",
            "slot[-1 - world.rank] if world.rank < len(slot)",
            "parallel/test_ranks_eval.py::test_evaluation_on_ranks_is_that_of_one_process",
        ),
        (
            "parallel/images.py",
            "        place = sorted(range(len(ways.order)), key=ways.order.__getitem__)",
            "        place = list(range(len(ways.order)))",
            "parallel/test_images.py::test_ranks_encode_what_others_show_and_send_it_home",
        ),
        (
            "parallel/images.py",
            "exchange_rows(tokens_MD, [",
            "exchange_rows(tokens_MD.detach(), [",
            "parallel/test_sharded_update.py::test_ranks_update_as_one[llava-images dealt]",
        ),
        (
            "core/encoders.py",
            "if held[rank] + n <= room]",
            "if n <= room]",
            "parallel/test_images.py::test_no_rank_gets_more_patches_than_the_fullest_shows",
        ),
        (
            "core/encoders.py",
            "cost.patch_pair * patches**2",
            "cost.patch_pair * patches",
            "parallel/test_images.py::test_cost_is_that_of_attention_too",
        ),
        (
            "train/step.py",
            "slot.image_gradients][-1:]",
            "slot.image_gradients][:1]",
            "parallel/test_sharded_update.py::test_ranks_update_as_one[llava-summed once per step]",
        ),
        (
            "data/reader.py",
            "writes=world.first and group.first)",
            "writes=world.first)",
            "data/test_shared_packs.py::test_a_decode_that_times_out_on_one_rank_is_rejected_by_both",
        ),
        (
            "checkpoint/store.py",
            "    return faults[0] if faults else found",
            "    return found",
            "checkpoint/test_verified_together.py::test_damage_that_one_rank_finds_is_damage_for_all",
        ),
        (
            "checkpoint/store.py",
            "verify(path, run, world.rank, world.size)",
            "verify(path, run)",
            "checkpoint/test_verified_together.py::test_each_file_is_read_by_one_rank",
        ),
    ],
    "cluster": [
        (
            "parallel/ranks.py",
            "        for alike in _alike(parameters):\n            torch",
            "        for alike in _alike(parameters) if torch.distributed.get_rank() == 0 else ():\n            torch",
            "parallel/test_sharded_update.py::test_two_ranks_update_as_one[replicate-llava]",
        ),
        (
            "train/stragglers.py",
            "speeds[rank] < SLOW * speed:",
            "speeds[rank] < 0:",
            "train/test_stragglers.py::test_a_rank_that_computes_slowly_is_named_once_its_window_is_full",
        ),
        (
            "train/stragglers.py",
            "- (self._world.waits[0] - others)",
            "",
            "train/test_stragglers.py::test_forward_passes_of_blocks_are_timed_and_waits_for_others_are_not",
        ),
        (
            "train/evidence.py",
            "            if not (self.last and self.skips):",
            "            if True:",
            "train/test_skipped_spikes.py::test_a_skipped_spike_leaves_what_a_step_that_is_not_finite_leaves",
        ),
        (
            "train/saving.py",
            '"best": None, "losses": None}',
            '"best": None}',
            "train/test_skipped_spikes.py::test_the_losses_of_a_stage_are_not_compared_with_those_of_the_one_before",
        ),
        (
            "train/step.py",
            '    if outcome == "applied":',
            "    if bool(finite):",
            "train/test_skipped_spikes.py::test_a_skipped_spike_leaves_what_a_step_that_is_not_finite_leaves",
        ),
        (
            "train/stage.py",
            "LossSpikes(state.losses or (), skips",
            "LossSpikes((), skips",
            "train/test_skipped_spikes.py::test_a_resumed_run_skips_the_spikes_of_an_uninterrupted_one",
        ),
        (
            "train/evidence.py",
            "max(DEVIATIONS * statistics.pstdev(before), FLOOR)",
            "DEVIATIONS * statistics.pstdev(before)",
            "study/test_replay.py::test_a_loss_is_a_spike_far_above_those_before_it_alone",
        ),
        (
            "train/evidence.py",
            "if math.isfinite(loss):",
            "if True:",
            "study/test_replay.py::test_a_loss_is_a_spike_far_above_those_before_it_alone",
        ),
        (
            "study/replay.py",
            "x.register_hook(lambda gradient, name=name, batch=self._batch: self._gradient(gradient, name, batch))",
            "pass",
            "study/test_replay.py::test_a_gradient_that_is_not_finite_is_located",
        ),
        (
            "checkpoint/store.py",
            "needed = sum(world.gather_patiently(bytes_to_write(draft, files, world.rank, world.size)))",
            "needed = bytes_to_write(draft, files, world.rank, world.size)",
            "checkpoint/test_faults.py::test_room_is_asked_for_what_all_writers_write",
        ),
        (
            "checkpoint/store.py",
            "(_manifests(linked_from, run) if linked_from is not None else [])",
            "[]",
            "study/test_replay.py::test_frozen_weights_are_linked_and_not_copied",
        ),
        (
            "parallel/watch.py",
            "> self._limit_s",
            "> 1e9",
            "parallel/test_rank_faults.py::test_a_rank_that_is_stopped_while_saving_is_named",
        ),
        (
            "study/hang.py",
            "> min(after) + CLOCKS_S",
            "> min(after)",
            "parallel/test_hang.py::test_a_record_of_an_earlier_moment_accuses_nobody",
        ),
        (
            "study/hang.py",
            "if has_ended(where)",
            "if not has_ended(where)",
            "parallel/test_hang.py::test_a_rank_that_has_ended_is_told_from_one_that_runs",
        ),
        (
            "study/hang.py",
            "if len(set(issued.values())) < 2:",
            "if len(set(issued.values())) < 9:",
            "parallel/test_hang.py::test_the_rank_that_differs_is_named_with_the_call",
        ),
        (
            "recipes/cluster.py",
            "if rate < SLOW * median\n    ]",
            "if rate < 0\n    ]",
            "parallel/test_cluster.py::test_an_odd_rank_is_named_with_its_host",
        ),
    ],
    "failures": [
        (
            "data/workers.py",
            "        if isinstance(result, Exception):\n            raise result\n",
            "",
            "data/test_workers.py::test_what_a_job_raises_is_raised_in_its_turn",
        ),
        (
            "data/fetch/fetch.py",
            "labels_T=np.full_like(document.labels_T, IGNORE)) if bad else document",
            "labels_T=np.full_like(document.labels_T, IGNORE)) if False else document",
            "data/test_loader.py::test_an_image_that_breaks_at_fetching_keeps_its_place",
        ),
        (
            "data/workers.py",
            "            fresh = self._tried_alone(number, part)\n",
            "            self.jobs[number] = self.jobs[number].without(part, BadSample('decoder_crashed', 'image', how))\n",
            "data/test_workers.py::test_what_happens_once_costs_no_sample",
        ),
        (
            "core/errors.py",
            '    "can\'t allocate memory",\n    "Cannot allocate memory",\n',
            "",
            "train/test_step.py::test_batch_that_does_not_fit_into_memory_is_named",
        ),
        (
            "train/start.py",
            "if part not in again or not again[part].whole(len(names))]",
            "]",
            "train/test_resume.py::test_memory_remedy_names_no_part_that_is_recomputed_already",
        ),
        (
            "parallel/launch.py",
            "torch.use_deterministic_algorithms(on)",
            "pass",
            "parallel/test_launch.py::test_deterministic_algorithms_are_set_and_put_back",
        ),
        (
            "data/loader.py",
            "    if any(other != digests[0] for other in digests):",
            "    if False:",
            "data/test_plan.py::test_ranks_that_plan_differently_stop",
        ),
    ],
    "user code": [
        (
            "core/user_code.py",
            'return f"{self.name} {digest_of(self.content)}"',
            "return self.name",
            "data/test_user_rows.py::test_changed_file_makes_a_new_index_and_is_named_on_resume",
        ),
        (
            "core/user_code.py",
            "str(folder.absolute() / Path(file).expanduser())",
            "str(Path(file).expanduser())",
            "core/test_user_code.py::test_paths_of_code_start_from_a_folder",
        ),
        (
            "core/user_code.py",
            "            line = traceback.tb_lineno\n",
            "            line = line or traceback.tb_lineno\n",
            "core/test_user_code.py::test_an_error_while_running_has_the_last_line_of_the_file",
        ),
        (
            "data/reader.py",
            "own = any(rows.layout.code for rows in validation)",
            "own = False",
            "data/test_user_rows.py::test_a_changed_file_of_a_validation_source_is_told",
        ),
        (
            "data/layouts/layouts.py",
            'kind = None if self.code else ""',
            'kind = ""',
            "data/test_user_rows.py::test_failing_user_function_rejects_the_row_with_both_lines",
        ),
        (
            "data/sources/sources.py",
            "None if own else (*COLUMNS, *mapping.columns_read)",
            "(*COLUMNS, *mapping.columns_read)",
            "data/test_user_rows.py::test_every_column_of_a_table_is_given",
        ),
        (
            "evals/metric.py",
            "not isinstance(score, Real) or not 0 <= float(score) <= 1",
            "not isinstance(score, Real)",
            "train/test_user_code.py::test_a_metric_that_fails_stops_the_evaluation",
        ),
        (
            "train/run.py",
            'write_yaml(with_files(settings, lambda file: f"{CODE}/{Path(file).name}"))',
            "write_yaml(settings)",
            "train/test_user_code.py::test_a_run_folder_has_its_code_and_can_be_moved",
        ),
    ],
    "answers": [
        ("evals/metric.py", "answer.casefold().split()", "answer.split()", "evals/test_exact_match.py::test_what_counts_of_an_answer"),
        (
            "evals/exact_match.py",
            "islice(usable(asked, rejected), limit)",
            "islice(usable(asked, rejected), None)",
            "study/test_evaluate.py::test_a_limit_counts_what_it_asks",
        ),
        (
            "generate/generate.py",
            "int(p.positions_T3.max()) + 1",
            "len(p.tokens_T)",
            "generate/test_families.py::test_greedy_answers_equal_transformers",
        ),
        (
            "kernels/attention.py",
            "self.lengths = [self.lengths[row] for row in rows]",
            "self.lengths = self.lengths[: len(rows)]",
            "kernels/test_attention.py::test_decoding_equals_attention_over_the_whole_sequence",
        ),
        (
            "generate/sampling.py",
            'rng_for(seed, "generate", row, step)',
            'rng_for(seed, "generate", step)',
            "generate/test_sampling.py::test_a_draw_depends_on_its_own_address_alone",
        ),
        (
            "generate/chat.py",
            '(*self.messages, Message("user", (*self.waiting',
            '(Message("user", (*self.waiting',
            "generate/test_chat.py::test_each_answer_sees_the_whole_conversation",
        ),
    ],
    "numbers": [
        (
            "train/metrics.py",
            "        self._book()\n        before, self.phase = self.phase, on\n",
            "        before, self.phase = self.phase, on\n",
            "train/test_metrics.py::test_seconds_inside_of_others_are_counted_once",
        ),
        (
            "train/unchanged.py",
            ".to(torch.bfloat16, copy=True)",
            ".to(x.dtype, copy=True)",
            "train/test_metrics.py::test_weights_that_stay_the_same_in_bfloat16_are_counted",
        ),
        (
            "train/top_k.py",
            "{str(n): total / rows for",
            "{str(n): total for",
            "train/test_metrics.py::test_probabilities_are_means_over_supervised_tokens",
        ),
        (
            "study/explain/rules.py",
            '"share": Threshold(0.1,',
            '"share": Threshold(0.5,',
            "study/test_explain.py::test_a_tenth_of_wall_time_names_a_cause",
        ),
        (
            "study/explain/rules.py",
            "max(trace.busy_s - trace.chained_s, shortest_s)",
            "trace.busy_s - trace.chained_s",
            "study/test_explain.py::test_shorter_kernels_win_nothing_where_the_host_is_slower",
        ),
        (
            "study/explain/rules.py",
            "    if is_one_worker(run) or is_one_rank(run):\n",
            "    if is_one_worker(run):\n",
            "study/test_explain.py::test_waits_of_one_rank_alone_are_its_workers",
        ),
        (
            "study/explain/run_facts.py",
            "seen[step.attempt, step.stage_index] > WARM_UP",
            "seen[step.attempt, step.stage_index] > 0",
            "study/test_explain.py::test_the_first_steps_of_each_stage_and_attempt_are_left_out",
        ),
        (
            "study/explain/run_facts.py",
            'least[line["global_step"]] = min(least.get(line["global_step"], float("inf")), line["communication_s"])',
            'least[line["global_step"]] = line["communication_s"] + least.get(line["global_step"], 0.0)',
            "study/test_explain.py::test_exchange_is_that_of_the_rank_that_waits_least",
        ),
        (
            "study/explain/trace_facts.py",
            "            open_at.pop(stream, None)\n",
            "            pass\n",
            "study/test_explain.py::test_a_trace_by_hand_has_its_times",
        ),
        (
            "study/trace.py",
            'max(event["dur"] - inner[number], 0.0)',
            'event["dur"]',
            "study/test_profile.py::test_each_moment_belongs_to_one_operator_part_and_pass",
        ),
        (
            "study/trace.py",
            'threads = {steps[0]["tid"], *(e["tid"] for e in ran if is_backward(e))}',
            'threads = {steps[0]["tid"]}',
            "study/test_profile.py::test_a_backward_pass_may_run_on_a_thread_of_its_own",
        ),
        (
            "study/trace.py",
            'if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]',
            'if e.get("ph") == "X" and e["name"].startswith(STEP)]',
            "study/test_profile.py::test_a_backward_pass_may_run_on_a_thread_of_its_own",
        ),
        (
            "study/compare.py",
            "order = vary.values if repeat % 2 == 0 else vary.values[::-1]",
            "order = vary.values",
            "study/test_compare.py::test_launches_take_turns_and_what_is_no_training_is_left_out",
        ),
        (
            "study/ledger.py",
            " if name not in KEPT_OF_LOST}",
            "}",
            "study/test_ledger.py::test_an_attempt_that_overlaps_the_next_is_not_counted_twice",
        ),
        (
            "study/ledger.py",
            'gap = begin - _number(line.get("elapsed_s")) - attempt.last_wall',
            "gap = begin - attempt.last_wall",
            "study/test_ledger.py::test_a_kill_in_a_save_costs_the_steps_since_the_last_one",
        ),
        (
            "study/side_by_side.py",
            'OF_AN_ATTEMPT = ("resumed_from", "elapsed_s", "wall", "attempt", "kind")',
            'OF_AN_ATTEMPT = ("resumed_from", "elapsed_s", "wall", "attempt", "kind", "precision")',
            "study/test_side_by_side.py::test_runs_that_were_not_measured_alike_are_refused",
        ),
        (
            "train/trackers/tracker.py",
            "except BaseException as error:",
            "except Exception as error:",
            "train/test_trackers.py::test_a_tracker_that_fails_is_said_once_and_the_run_continues",
        ),
        (
            "train/samples.py",
            "        model.train(was_training)\n",
            "        pass\n",
            "train/test_trackers.py::test_samples_change_no_loss",
        ),
        (
            "study/watch.py",
            'not in (HOST, "localhost")',
            'not in (HOST, "localhost", "evil.example")',
            "study/test_watch.py::test_nothing_but_the_runs_can_be_read_and_nothing_written",
        ),
    ],
    "figures": [
        (
            "train/metrics.py",
            'return self.report.counts.real / self.seconds["step"]',
            'return self.report.counts.slots / self.seconds["step"]',
            "train/test_metrics.py::test_rates_of_a_line_leave_padding_out",
        ),
        (
            "models/flops.py",
            "pair=int((tokens_S * (tokens_S + 1) // 2).sum())",
            "pair=int((tokens_S * tokens_S).sum())",
            "models/test_flops.py::test_causal_pairs_equal_the_counter",
        ),
        (
            "models/flops.py",
            "+= flops * (reached + trains)",
            "+= flops * 2",
            "models/test_flops.py::test_every_way_to_freeze_equals_the_counter",
        ),
        ("models/flops.py", '    "H100 PCIe": 7.56e14,\n', "", "train/test_flops.py::test_peak_of_each_product_is_its_own"),
    ],
    "CUDA graphs": [
        (
            "train/fixed_batch.py",
            "_padded(batch.labels_L, to.tokens, IGNORE)",
            "_padded(batch.labels_L, to.tokens)",
            "train/test_cuda_graph.py::test_padded_batch_has_the_same_loss_and_gradients[text]",
        ),
        (
            "train/fixed_batch.py",
            "at_end = to.tokens - PADDING + torch.arange(to.visual) % PADDING",
            "at_end = torch.arange(to.visual) % PADDING",
            "train/test_cuda_graph.py::test_padded_batch_has_the_same_loss_and_gradients[llava]",
        ),
        (
            "train/fixed_batch.py",
            "        longest=to.tokens,\n        rows_L=torch.cat",
            "        rows_L=torch.cat",
            "train/test_cuda_graph.py::test_every_array_has_its_capacity[text]",
        ),
        (
            "train/cuda_graph.py",
            "            optimizer.found_inf = self._found_inf",
            "            optimizer.found = self._found_inf",
            "train/test_cuda_graph.py::test_capturing_and_a_bad_step_change_nothing",
        ),
        (
            "train/cuda_graph.py",
            "        p.grad = None\n    yield",
            "        pass\n    yield",
            "train/test_cuda_graph.py::test_text_alone_leaves_the_tower_and_its_state_as_they_are",
        ),
        (
            "train/optim.py",
            '                group["lr"].fill_(rate)',
            '                group["lr"] = torch.tensor(rate)',
            "train/test_cuda_graph.py::test_updates_have_the_weights_of_eager_ones[text]",
        ),
        (
            "train/cuda_graph.py",
            "        before_update(loss, norm, outcome)\n        self._applies[images]()",
            "        self._applies[images]()\n        before_update(loss, norm, outcome)",
            "train/test_cuda_graph.py::test_capturing_and_a_bad_step_change_nothing",
        ),
    ],
    "compiled blocks": [
        (
            "models/compiled.py",
            "x_TD = x_TD.view_as(x_TD)",
            "x_TD = x_TD",
            "parallel/test_axes.py::test_compiled_blocks_with_collectives_update_as_one_process[ep]",
        ),
        (
            "models/compiled.py",
            "y_TD, gate_T1 = apart(normed_TD,",
            "y_TD, gate_T1 = apart(x_TD,",
            "parallel/test_axes.py::test_compiled_blocks_with_collectives_update_as_one_process[ep]",
        ),
        (
            "models/compiled.py",
            "whole = not (experts_apart and",
            "whole = not (False and",
            "parallel/test_axes.py::test_compiled_blocks_with_collectives_update_as_one_process[ep]",
        ),
        (
            "models/compiled.py",
            "    return x_TD + block.mlp.joined(",
            "    return block.mlp.joined(",
            "parallel/test_axes.py::test_compiled_blocks_with_collectives_update_as_one_process[ep]",
        ),
        (
            "models/compiled.py",
            "fullgraph=True, dynamic=True)",
            "fullgraph=True, dynamic=False)",
            "models/test_compiled.py::test_graphs_over_varied_batches_and_equality_with_eager[text]",
        ),
        (
            "models/layers.py",
            "or len(x_TD) < 2:",
            "or not len(x_TD):",
            "models/test_compiled.py::test_graphs_over_varied_batches_and_equality_with_eager[text]",
        ),
        (
            "models/layers.py",
            "        block.forward.again = again\n        return block(*args)",
            "        return block(*args)",
            "models/test_compiled.py::test_recomputation_is_in_the_graph",
        ),
        (
            "train/compile.py",
            "    plan.model.zero_grad(set_to_none=True)\n",
            "",
            "train/test_compile.py::test_compiled_run_has_the_losses_of_one_without",
        ),
        (
            "kernels/fla.py",
            "    return _BOUNDS[0]",
            "    return cu_S1.clone()",
            "kernels/test_fla.py::test_one_graph_with_the_results_of_our_chunks[aot_eager]",
        ),
    ],
    "fetching ahead": [
        (
            "data/fetch_thread.py",
            "        if self.left > 0:\n",
            "        if True:\n",
            "data/test_fetch_thread.py::test_nothing_is_made_before_start_and_one_item_after",
        ),
        (
            "data/fetch_thread.py",
            "                future.set_exception(error)",
            "                future.set_result(_END)",
            "data/test_fetch_thread.py::test_errors_are_raised_where_the_item_is_taken",
        ),
        (
            "data/fetch_thread.py",
            "            if self._stopping:\n",
            "            if False:\n",
            "data/test_fetch_thread.py::test_a_step_of_many_packs_is_left_between_two_of_them",
        ),
        (
            "data/loader.py",
            "                thread.start()  #",
            "                pass  #",
            "train/test_resume.py::test_position_saved_is_of_steps_trained_not_of_those_fetched",
        ),
        (
            "parallel/copies.py",
            "first = [replace(batch, ahead=_copied(batch, device, copying, computing)) for batch in pinned[:count]]",
            "first = pinned[:1]",
            "parallel/test_copies.py::test_next_step_is_pinned_whole_and_its_first_batch_copied_ahead",
        ),
        (
            "train/step.py",
            "    arriving = on_device(map(ranks.rows, batches), device)\n",
            "    arriving = ((x, x.to(device)) for x in batches)\n",
            "parallel/test_copies.py::test_validation_batches_are_pinned_and_copied_ahead",
        ),
    ],
    "messages": [
        ("core/errors.py", "code: ClassVar[int] = 3", "code: ClassVar[int] = 2", "test_docs.py::test_exit_codes_are_those_of_the_errors"),
        (
            "core/errors.py",
            'return f" Did you mean {close!r}?" if close else ""',
            'return ""',
            "recipes/test_read.py::test_a_wrong_setting_is_named",
        ),
        (
            "data/containers/json_rows.py",
            "str(self.file.path), self.firsts[place.shard] + place.number\n",
            "str(self.file.path), place.number\n",
            "data/test_containers.py::test_numbers_of_rejects_count_from_the_start_of_the_file",
        ),
        (
            "data/rejects.py",
            "Against {cause}: {REMEDIES[cause]} Or raise",
            "Or raise",
            "data/test_rejects.py::test_reject_rate_is_over_all_rows",
        ),
        (
            "data/rejects.py",
            "return Reject(id, file, row, bad.field, bad.cause, bad.message)",
            "return Reject(id, file, row, bad.cause, bad.cause, bad.message)",
            "data/test_rejects.py::test_a_line_names_id_file_row_field_cause_and_message",
        ),
        (
            "core/problems.py",
            "    return list(lines)",
            "    return list(lines)[:1]",
            "recipes/test_read.py::test_all_problems_come_at_once",
        ),
    ],
    "distillation": [
        (
            "distill/http.py",
            " and self._others_are_answered(before)",
            "",
            "distill/test_server.py::test_a_server_that_fails_at_everything_ends_the_job",
        ),
        (
            "distill/http.py",
            "known.count > before or known.count == 0",
            "True",
            "distill/test_server.py::test_a_request_that_crashes_the_server_each_time_is_its_own_failure",
        ),
        (
            "distill/http.py",
            "if error.code in BUSY:",
            "if error.code == 500:",
            "distill/test_server.py::test_a_failure_that_may_pass_is_tried_again",
        ),
        ("distill/http.py", 'text.replace(self.key, "[key]")', "text", "distill/test_server.py::test_the_key_is_sent_and_never_shown"),
        (
            "distill/http.py",
            "(one.rests_until > now, max(one.rests_until - now, 0.0), one.in_flight)",
            "one.in_flight",
            "distill/test_server.py::test_of_two_servers_one_that_is_down_costs_no_wait",
        ),
        (
            "study/hang.py",
            "in lines[:depth] if",
            "in lines if",
            "parallel/test_hang.py::test_the_stack_of_an_abort_names_call_and_line",
        ),
        (
            "train/distill.py",
            "    with sole_owner(own):",
            "    if own:",
            "distill/test_job.py::test_a_second_command_in_one_folder_is_locked_out",
        ),
        (
            "distill/server.py",
            "        servers.limit_name = NEWER_LIMIT\n",
            "",
            "distill/test_server.py::test_a_server_that_names_the_newer_limit_is_asked_by_it_from_then_on",
        ),
        (
            "distill/server.py",
            " or NEWER_LIMIT not in str(denied)",
            "",
            "distill/test_server.py::test_a_request_that_is_refused_is_an_answer_of_its_own",
        ),
        ("distill/ask.py", "{prompt.id}", "", "distill/test_job.py::test_several_prompts_and_answers_vote"),
        (
            "distill/job.py",
            "repeatable=False",
            "repeatable=True",
            "distill/test_job.py::test_an_attempt_that_lost_with_other_answers_is_dropped",
        ),
        (
            "distill/verdicts.py",
            "len(best) > accept",
            "len(best) >= accept",
            "distill/test_verdicts.py::test_a_majority_is_more_than_its_share",
        ),
        (
            "kernels/distillation.py",
            "(q_RK - p_RK) * (scale / temperature)",
            "(q_RK - p_RK) * scale",
            "kernels/test_distillation.py::test_losses_and_gradients",
        ),
        (
            "data/fetch/batches.py",
            "start + likely.rows_R.astype(np.int64)",
            "likely.rows_R.astype(np.int64)",
            "distill/test_model.py::test_a_teacher_adds_the_same_packed_and_unpacked",
        ),
        (
            "data/text/documents.py",
            "else int(same.argmin()) + 1",
            "else both",
            "distill/test_model.py::test_probabilities_hold_up_to_the_first_other_token",
        ),
    ],
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], int(os.environ.get("JOBS", "2"))))
