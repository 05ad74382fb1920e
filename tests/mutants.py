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
            "data/layouts/conversations.py",
            "return [pictures[n] for n in numbers] if numbered else pictures",
            "return pictures",
            "data/test_other_trainers.py::test_trl_numbered_pictures",
        ),
        (
            "data/layouts/conversations.py",
            'piece = piece.removeprefix("\\n") if n else piece',
            "piece = piece",
            "data/test_sources.py::test_placeholders_wherever_they_stand",
        ),
        ("data/layouts/conversations.py", 'if messages[-1].role != "assistant":', "if False:", "data/test_sources.py::test_bad_llava_rows"),
        (
            "data/plan/read_shard.py",
            "hold_out_draw(names) if names else -1.0",
            "-1.0",
            "data/test_loader.py::test_held_out_pictures_are_never_trained_on",
        ),
    ],
    "images": [
        (
            "data/images/decode.py",
            "6: Pillow.Transpose.ROTATE_270",
            "6: Pillow.Transpose.ROTATE_90",
            "data/test_image_formats.py::test_a_turned_picture_is_upright_by_every_way",
        ),
        (
            "data/images/decode.py",
            "_orientation(image) >= 5",
            "_orientation(image) > 5",
            "data/test_image_formats.py::test_a_turned_picture_is_upright_by_every_way",
        ),
        (
            "core/image_rule.py",
            "return max(cell, math.floor(height / by / cell) * cell), max",
            "return max(cell, math.ceil(height / by / cell) * cell), max",
            "data/test_resizing.py::test_any_size_becomes_what_the_references_say",
        ),
        ("data/images/decode.py", "(255, 255, 255, 255)", "(0, 0, 0, 255)", "data/test_image_formats.py::test_the_zoo"),
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
            "data/text/templates.py",
            'learned = message.role == "assistant" and n > last_question',
            'learned = message.role == "assistant"',
            "data/test_templates.py::test_what_is_learned_is_what_will_be_asked_for",
        ),
        (
            "data/text/documents.py",
            "yield [encoder.controls[segment.token]], segment.trained and not segment.masked, False",
            "yield [encoder.controls[segment.token]], segment.trained, False",
            "data/test_marks.py::test_a_masked_answer_changes_labels_alone",
        ),
        (
            "data/text/templates.py",
            "(seconds[n] + seconds[min(n + frames - 1, last)]) / 2",
            "seconds[n]",
            "data/test_templates.py::test_films_are_slices_with_times",
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
            "visual_M = visual_M + np.repeat(bounds[: len(documents)], [len(d.visual_M) for d in documents])",
            "visual_M = visual_M.astype(np.int64)",
            "data/test_batches.py::test_a_batch_by_hand",
        ),
        (
            "data/fetch/batches.py",
            "else np.flatnonzero(labels_T != IGNORE)",
            "else np.flatnonzero(labels_T > 0)",
            "data/test_batches.py::test_token_zero_is_a_token",
        ),
        ("data/fetch/batches.py", "            real=real,", "            real=slots,", "data/test_batches.py::test_a_batch_by_hand"),
    ],
    "plan": [
        (
            "data/plan/order.py",
            "visits_G = -(-sizes_G // share)",
            "visits_G = sizes_G // share + 1",
            "data/test_order.py::test_visits_have_each_row_once_and_share_pictures_evenly",
        ),
        (
            "data/plan/blend.py",
            "whole_weights[n] * (total + 1) - given[n] * summed",
            "-given[n]",
            "data/test_plan.py::test_shares_are_exact_at_any_place",
        ),
        (
            "data/plan/blend.py",
            "kept = kept & (np.cumsum(kept) <= self._limited(source)[shard])",
            "pass",
            "data/test_plan.py::test_limits_over_shards",
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
            "data/plan/position.py",
            '"bins": self.bins.written,',
            '"bins": [],',
            "data/test_plan.py::test_any_history_of_restarts_on_any_ranks_gives_the_same_steps",
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
            "data/test_fetch.py::test_pictures_that_kill_decoders_are_rejected_and_nothing_else_changes",
        ),
        (
            "data/loader.py",
            "        met.append(window.plan.rest)\n",
            "",
            "data/test_loader.py::test_reject_rate_is_of_different_rows_whatever_the_order",
        ),
        (
            "data/plan/plan.py",
            "RowsMet(int(self.first_R[start:end].sum()), first, again)",
            "RowsMet(end - start, first, again)",
            "data/test_loader.py::test_row_of_a_repeated_source_counts_once",
        ),
        (
            "data/plan/position.py",
            "                last[drawn] = place",
            "                last[drawn] = 0",
            "data/test_position.py::test_bins_are_read_back",
        ),
    ],
    "loss": [
        (
            "train/step.py",
            "loss = loss / counts.supervised",
            "loss = loss / batch.counts.supervised",
            "train/test_step.py::test_the_update_does_not_depend_on_how_the_step_is_cut",
        ),
        (
            "train/step.py",
            "total += loss.detach()",
            "total = loss.detach()",
            "train/test_step.py::test_the_update_does_not_depend_on_how_the_step_is_cut",
        ),
        (
            "train/step.py",
            "            labels += batch.counts.supervised",
            "            labels += batch.counts.real",
            "train/test_step.py::test_validation_is_the_mean_over_all_labels_without_dropout",
        ),
        ("train/step.py", "    model.eval()", "    model.train()", "train/test_step.py::test_validation_turns_dropout_off"),
        (
            "train/step.py",
            "figures = [total - added, norm",
            "figures = [total, norm",
            "train/test_experts.py::test_the_reported_loss_is_without_what_balances",
        ),
        (
            "train/step.py",
            "balance.coef * batch.counts.supervised * balance_loss(load)",
            "balance.coef * counts.supervised * balance_loss(load)",
            "train/test_experts.py::test_the_auxiliary_loss_moves_weights_by_its_gradient",
        ),
        (
            "kernels/cross_entropy.py",
            "dlogits_RV = dlogits_RV.mul_(wanted_R1).to(x_LD.dtype)",
            "dlogits_RV = dlogits_RV.to(x_LD.dtype)",
            "kernels/test_cross_entropy.py::test_loss_and_gradients",
        ),
    ],
    "step": [
        (
            "train/step.py",
            "model.zero_grad(set_to_none=True)",
            "pass",
            "train/test_step.py::test_what_a_step_before_used_is_left_alone_too",
        ),
        (
            "train/step.py",
            "model.zero_grad(set_to_none=True)",
            "model.zero_grad(set_to_none=False)",
            "train/test_step.py::test_what_a_step_before_used_is_left_alone_too",
        ),
        (
            "train/step.py",
            "        if max_grad_norm:",
            "        if False:",
            "train/test_step.py::test_clipping_bounds_the_gradient_that_is_applied",
        ),
        (
            "train/step.py",
            "(total.isfinite() & norm.isfinite()).float()",
            "total.isfinite().float()",
            "train/test_step.py::test_a_step_that_is_not_finite_changes_nothing",
        ),
        (
            "train/step.py",
            'seed_for(seed, "dropout", step, i)',
            'seed_for(seed, "dropout", i)',
            "train/test_step.py::test_dropout_is_addressed_by_step_and_micro_batch",
        ),
        (
            "train/step.py",
            'seed_for(seed, "dropout", step, i)',
            'seed_for(seed, "dropout", step)',
            "train/test_step.py::test_dropout_is_addressed_by_step_and_micro_batch",
        ),
    ],
    "what trains": [
        (
            "train/trainable.py",
            "parameter.requires_grad_(learns)",
            "parameter.requires_grad_(True)",
            "train/test_trainable.py::test_all_that_trains_changes_and_nothing_else",
        ),
        (
            "train/trainable.py",
            "for stage in run.stages[index:] for part",
            "for stage in run.stages[: index + 1] for part",
            "train/test_trainable.py::test_bf16_keeps_what_a_later_stage_trains_in_fp32",
        ),
        ("train/trainable.py", "        merge(model)\n", "", "train/test_trainable.py::test_a_border_merges_what_it_does_not_go_on_with"),
        (
            "train/trainable.py",
            "    model.recompute(checkpointed(stage, facts))",
            "    model.recompute(())",
            "train/test_flops.py::test_each_step_states_its_arithmetic",
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
            "kernels/attention.py",
            "for x in (q_THK, k_TGK, v_TGK)), 0.0, causal)",
            "for x in (q_THK, k_TGK, v_TGK)), 0.0, True)",
            "kernels/test_attention.py::test_output_and_gradients",
        ),
        (
            "kernels/attention.py",
            "LEFT_ONLY if causal else BOTH_SIDES",
            "BOTH_SIDES",
            "kernels/test_attention.py::test_call_of_variable_length_attention",
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
            "checkpoint/test_store.py::test_an_edited_manifest_is_refused_even_with_right_looking_digests",
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
            "going = [other for other in going if other != path]\n            break",
            "break",
            "checkpoint/test_store.py::test_pruning_never_deletes_the_last_good_one",
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
            "bundle/test_exporting.py::test_transformers_computes_the_same_and_a_second_export_is_the_same_file_for_file",
        ),
        (
            "bundle/exporting.py",
            "x.float() + layer.scale * (layer",
            "x.float() + (layer",
            "bundle/test_exporting.py::test_adapters_are_merged_into_what_is_written_and_stay_on_the_model",
        ),
        (
            "bundle/exporting.py",
            "_whole(scale * len(a_rI))",
            "_whole(scale)",
            "bundle/test_exporting.py::test_peft_loads_the_adapter_on_the_exported_base",
        ),
        (
            "bundle/importing.py",
            "mean_D = x_VD.float().mean(0).to(x_VD.dtype)",
            "mean_D = x_VD[0]",
            "bundle/test_importing.py::test_a_vocabulary_without_free_rows_grows_by_means",
        ),
    ],
    "prepared": [
        ("data/prepared/packed.py", 'm.get("loss", True)', "True", "data/test_marks.py::test_an_archive_of_prepared_data_keeps_the_mark"),
        (
            "data/prepared/packed.py",
            "archive = bisect_right(self.ends, place.begin)",
            "archive = 0",
            "data/test_prepare.py::test_the_same_batches",
        ),
        (
            "data/prepared/packed.py",
            "        if differs:\n",
            "        if False:\n",
            "data/test_prepare.py::test_other_settings_are_refused_by_name",
        ),
        (
            "data/prepared/packed.py",
            "file.size != archive.bytes or (small and",
            "file.size != archive.bytes or (False and",
            "data/test_prepare.py::test_damage_is_noticed_and_mended",
        ),
        (
            "data/prepared/packed.py",
            "if window < len(stored) and stored[window] != digest:",
            "if False:",
            "data/test_prepare.py::test_an_index_of_another_plan_is_noticed",
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
            "data/test_loader.py::test_a_picture_that_breaks_at_fetching_keeps_its_place",
        ),
        (
            "data/workers.py",
            "return not self.jobs or (ahead <= self.settings.read_ahead and",
            "return not self.jobs or (",
            "data/test_workers.py::test_read_ahead_is_bounded_in_bytes",
        ),
        (
            "data/workers.py",
            "            fresh = self._tried_alone(number, part)\n",
            "            self.jobs[number] = self.jobs[number].without(part, BadSample('decoder_crashed', 'image', how))\n",
            "data/test_workers.py::test_what_happens_once_costs_no_sample",
        ),
    ],
    "answers": [
        ("evals/exact_match.py", "answer.casefold().split()", "answer.split()", "evals/test_exact_match.py::test_what_counts_of_an_answer"),
        ("evals/exact_match.py", '.strip(" .,!?")', ".strip()", "evals/test_exact_match.py::test_what_counts_of_an_answer"),
        (
            "evals/exact_match.py",
            'answer.finish == "length")',
            'answer.finish == "stop")',
            "evals/test_exact_match.py::test_the_scores_are_the_hand_counted_ones",
        ),
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
    ],
    "figures": [
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
            "data/test_rejects.py::test_rate_is_judged_against_all_rows",
        ),
        (
            "data/rejects.py",
            "return Reject(id, file, row, bad.field, bad.cause, bad.message)",
            "return Reject(id, file, row, bad.cause, bad.cause, bad.message)",
            "data/test_rejects.py::test_a_line_names_id_file_row_field_cause_and_message",
        ),
    ],
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], int(os.environ.get("JOBS", "2"))))
