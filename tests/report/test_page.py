"""The page about a run: what it shows, and that nothing from a run can do anything in it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from metrics_page import CATALOGUE, find
from run_folder import ENVIRONMENT, row_of, sample, write_run

from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS
from dapo_jax.errors import InputError
from dapo_jax.monitor.console import STAGES
from dapo_jax.monitor.environment import TOTAL_STEPS
from dapo_jax.monitor.recipe import Recipe
from dapo_jax.monitor.records import to_json_line
from dapo_jax.tools.report.describe import algorithm, facts, steps_left
from dapo_jax.tools.report.read import read_run
from dapo_jax.tools.report.report import main, report
from dapo_jax.tools.report.words import ALARMS, CHARTS, EFFICIENCY, ESTIMATORS

SECTIONS = ["In short", "Curves", "What was trained", "What the group filter did", "Where the time went", "Alarms"]
SECTIONS += ["Samples before and after", "Options"]
TIME = "2026-01-02 03:04:08"
HOSTILE = "</script></pre><img src=x onerror=alert(1)><script>alert(2)</script>{{ 7*7777 }}&lt;\"'"


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of all, of each cell and of each heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.texts.append((tag, " " if tag in ("td", "th", "small") else ""))
        if tag not in ("meta", "input", "path", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "line"):
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def text(self) -> str:
        return " ".join("".join(text for tag, text in self.texts if tag not in ("style", "script")).split())


def page_of(*folders: Path, names: tuple[str, ...] = ()) -> tuple[Page, str]:
    runs = list(zip(names or [""] * len(folders), map(str, folders), strict=True))
    text = report(runs, folders[0] / "page.html").read_text()
    return Page(text), text


def cells(text: str, name: str) -> list[str]:
    """The cells of the table row with this name."""
    [row] = re.findall(rf'<tr><th scope="row">{re.escape(name)}(?: <small>.*?</small>)?</th>(.*?)</tr>', text, re.S)
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td>(.*?)(?:<div class.*?)?</td>", row, re.S)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of a finished run, and its text."""
    samples = {1: [sample()], 4: [sample(response="3", acc=0.0)]}
    return page_of(write_run(tmp_path_factory.mktemp("run"), samples=samples))


def test_a_run_has_every_section_and_needs_nothing_else(whole):
    page, text = whole
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == SECTIONS and page.open == []
    assert not re.search(r"https?://|url\(|@import|src=", text)
    assert all(link["href"].startswith("#") for link in page.tags("a"))
    assert {link["href"][1:] for link in page.tags("a")} == {one["id"] for one in page.tags("section")}
    ids = [one["id"] for _, one in page.elements if "id" in one]
    assert len(ids) == len(set(ids))


def test_an_episode_shows_the_policys_turns_and_folds_calls_and_what_the_environment_says(tmp_path):
    texts = "<policy>", "<environment>", 'Hm.<tool_call>{"name": "f"}</tool_call>', "<environment>", "{a set}"
    turns = [{"by": ("policy", "environment")[number % 2], "text": text} for number, text in enumerate(texts)]
    _, text = page_of(write_run(tmp_path, samples={step: [sample() | {"turns": turns}] for step in (1, 4)}))
    assert text.count('<pre dir="auto" class="policy">&lt;policy&gt;</pre>') == 2
    assert (
        len(re.findall(r"<details><summary [^<]*Environment</summary><pre [^<]*&lt;environment&gt;</pre>", text)) == 4
    )
    assert text.count('<pre dir="auto" class="policy">Hm.</pre>') == text.count(">{a set}</pre>\n<p") == 2
    call = r'<details><summary [^<]*Call</summary><pre [^<]* class="policy">&lt;tool_call&gt;[^<]*/tool_call&gt;</pre>'
    assert len(re.findall(call, text)) == 2


def test_its_numbers_are_those_of_the_metrics(whole):
    page, text = whole
    assert "Complete: 4 of 4 steps." in page.text
    assert "(mean of 4 samples) rose from 0.100 at step 0 to 0.800 at step 4; the best of the run." in page.text
    for name, shown in {
        "Sampled": "80",
        "Kept": "48 (60%)",
        "Dropped, all right": "12 (15%)",
        "Dropped, all wrong": "20 (25%)",
        "Rounds": "2",
        "Requeued": "8",
        "Carried": "4",
        "Generated tokens": "2,400",
        "Generated per trained token": "2.50",
        "sampling": "24 s 37%",
        "evaluating": "25 s 38%",
        "the rest of the steps": "4 s 6.2%",
        "Sampling tokens": "75%",
        "Devices": "4 x NVIDIA H100, 2 processes",
    }.items():
        assert cells(text, name) == [shown], name
    assert "jax 0.11.0" in page.text
    assert "steps 2–3 (2 of 4 measured)" in page.text, "an alarm has its steps and words"
    assert "More than 0.5 of the trained responses ended at the length limit" in page.text
    assert ALARMS["truncation"].cure in page.text and ALARMS["kl_jump"].title not in page.text
    assert "Never on: heldout_drop, kl_jump." in page.text


def test_curves_have_the_measured_values_on_every_axis(whole):
    page, _ = whole
    drawn = [one for one in page.tags("svg") if "data-lines" in one]
    lines = {(one["aria-label"].split(".")[0], one["class"]): json.loads(one["data-lines"]) for one in drawn}
    for axis, label in (("steps", "training steps"), ("tokens", "tokens sampled"), ("seconds", "seconds of training")):
        [line] = lines[f"Entropy over {label}", f"x-{axis}"]
        assert line["step"] == [1, 2, 3, 4] and line["value"] == ["1.90", "1.80", "1.70", "1.60"]
        [line] = lines[f"Held-out accuracy, gsm8k over {label}", f"x-{axis}"]
        assert line["step"] == [0, 1, 2, 3, 4] and line["value"][-1] == "0.800"
    unchanged = page.text.partition("as they did not change beyond rounding: ")[2].partition(". What was trained")[0]
    assert "KL from the sampling policy (actor/ppo_kl)" in unchanged and "Learning rate (actor/lr)" in unchanged
    assert "actor/entropy" not in unchanged


def test_every_alarm_and_stage_has_words_and_every_curve_is_a_metric_and_every_cure_an_option():
    known = {variant for metric in CATALOGUE for variant in metric.variants()}
    assert {name.removeprefix("alarm/") for name in known if name.startswith("alarm/")} == set(ALARMS)
    stages = {name.removeprefix("timing_s/") for name in known if name.startswith("timing_s/")} - {"step"}
    assert stages == set(STAGES) - {"other", "load"}
    assert all(map(find, [chart.metric for chart in CHARTS] + list(EFFICIENCY)))
    options = {*DEFAULTS, *(key.rpartition(".")[0] for key in DEFAULTS)}
    for alarm in ALARMS.values():
        assert {*re.findall(r"\b[a-z]\w*(?:\.\w+)+", alarm.cure)} <= options
        assert alarm.limit is None or hasattr(Config().monitor.alarms, alarm.limit)
        assert ("{limit}" in alarm.meaning) == (alarm.limit is not None)


def test_nothing_from_a_run_is_markup(tmp_path):
    folder = tmp_path / "<img src=x>"
    options = {"model.path": HOSTILE, "data.task": "files", "data.train_files": (HOSTILE,)}
    hostile = sample(prompt=HOSTILE, response=HOSTILE) | {"ground_truth": HOSTILE}
    write_run(
        folder,
        options=options,
        recipe=Recipe(HOSTILE, [HOSTILE], {"model": {"path": "<b>"}}),
        samples={1: [hostile], 4: [hostile]},
        log=f"[2026-01-01 00:00:00] ERROR: {HOSTILE}\n",
    )
    rows = [row_of(step) | {f"eval/{HOSTILE}/acc/mean@4": step / 5, f"timing_s/{HOSTILE}": 1} for step in (1, 2, 3)]
    rows[-1][f"alarm/{HOSTILE}"] = 1.0
    (folder / "metrics.jsonl").write_text("".join(map(to_json_line, rows)))
    (folder / "environment.json").write_text(json.dumps({"host": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    page, text = page_of(folder, folder, names=(HOSTILE, "<i>second"))
    assert page.open == []
    assert {tag for tag, _ in page.elements} <= {
        *("html", "head", "meta", "title", "style", "script", "body", "header", "main", "footer", "nav", "section"),
        *("article", "div", "h1", "h2", "h3", "h4", "p", "ul", "li", "dl", "dt", "dd", "a", "b", "i", "bdi", "small"),
        *("code", "pre", "strong", "span", "table", "caption", "thead", "tbody", "tr", "th", "td", "figure"),
        *("figcaption", "output", "fieldset", "legend", "label", "input", "svg", "path", "line", "text"),
    }
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    [script] = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.tags("meta")[1]["content"]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    for json_text in [one["data-lines"] for one in page.tags("svg") if "data-lines" in one]:
        json.loads(json_text)
    assert page.text.count(" ".join(HOSTILE.split())) > 10 and "54439" not in page.text


def test_text_that_cannot_be_encoded_or_seen_is_shown(tmp_path):
    tricks = "a\x00b\x1b[31m\u202ec\ud800d"
    folder = write_run(tmp_path, samples={step: [sample(response=tricks)] for step in (1, 2)})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "alarm/\ud800": 1}) + "\n")
    assert page_of(folder)[0].text.count("a<U+0000>b<U+001B>[31m<U+202E>c<U+D800>d") == 2


def test_several_runs_are_side_by_side(tmp_path):
    first = write_run(tmp_path / "one", options={"seed": 1})
    second = write_run(tmp_path / "two", steps=2, options={"seed": 2, "actor.optim.lr": 1e-3})
    page, text = page_of(first, second, names=("", "faster"))
    assert "2 runs side by side" in page.text
    assert cells(text, "Sampled") == ["80", "40"] and cells(text, "Time") == ["1 min 5 s", "35 s"]
    lines = [json.loads(one["data-lines"]) for one in page.tags("svg") if "data-lines" in one]
    assert all([line["letter"] for line in one] == ["A", "B"] for one in lines)
    assert re.findall(r'<b class="key r\d">(.)</b> <bdi>(.*?)</bdi>', text)[:2] == [("A", "one"), ("B", "faster")]
    between = page.text.partition("Between the runs")[2].partition("Key numbers")[0]
    assert re.search(r"actor\.optim\.lr .*? 1e-06 0\.001", between) and re.search(r"seed .*? 1 2", between)
    assert "workdir" not in between and "rollout.n" not in between


def test_runs_that_differ_in_their_seed_alone_are_one_run_their_mean(tmp_path):
    def folder(arm: str, seed: int, steps: int = 4, **options) -> Path:
        found = write_run(tmp_path / arm / f"seed_{seed}", steps=steps, options={"seed": seed, **options})
        text = (found / "metrics.jsonl").read_text().replace('acc/mean@4": 0.8', f'acc/mean@4": {0.8 - seed / 10}')
        (found / "metrics.jsonl").write_text(text)
        return found

    base = [*(folder("base", seed) for seed in range(3)), folder("base", 3, steps=2)]
    slow = [folder("slow", seed, **{"actor.optim.lr": 1e-3}) for seed in (0, 2)]
    page, text = page_of(*base, *slow)
    assert re.findall(r'<b class="key r\d">(.)</b> <bdi>(.*?)</bdi>', text)[:2] == [("A", "base"), ("B", "slow")]
    # 4.303, Student's quantile of two degrees of freedom, times 0.1 / 3^(1/2)
    assert cells(text, "after") == ["0.700 ± 0.248 (0.600 to 0.800)", "0.700 (0.600 to 0.800)"]
    assert cells(text, "difference") == ["-", "+0.000"] and cells(text, "Sampled") == ["80", "80"]
    between = page.text.partition("Between the runs")[2].partition("Key numbers")[0]
    assert re.search(r"actor\.optim\.lr .*? 1e-06 0\.001", between) and "rollout.n" not in between
    assert "Means over the seeds 0, 1, 2, of" in page.text and "unfinished: base/seed_3 (2 of 4 steps)." in page.text
    assert text.index('id="curves"') < text.index('id="what"') and "Against" not in page.text
    [(first, _)] = [json.loads(one["data-lines"]) for one in page.tags("svg") if "gsm8k over training" in str(one)]
    assert first["value"][-1] == "0.700 (0.600–0.800)" and text.count('class="band r1"') == 9, "3 curves"
    assert "<h1><bdi>mine</bdi></h1>" in page_of(*base[:2], names=("mine", "mine"))[1]


@pytest.mark.parametrize(
    ("options", "name", "shown"),
    [
        ({"reward.functions": '{"right": "math_dapo"}'}, "Reward", '{"right": "math_dapo"}'),
        ({"reward.function": "none", "reward.model.path": "judge"}, "Reward", "the model judge"),
        ({"reward.model.path": "judge"}, "Reward", "auto, the model judge"),
        ({"reward.function": "none"}, "Reward", "none"),
        ({"reward.function": "none", "environment.path": "a.py:B"}, "Reward", "the environment, if it gives rewards"),
        (
            {"data.task": "reasoning_gym", "data.reasoning_gym.datasets": ("a", "b")},
            "Held-out data",
            "128 problems of the same kind",
        ),
        ({"data.task": "arithmetic"}, "Held-out data", "64 problems of the same kind"),
    ],
)
def test_rewards_and_held_out_problems_are_those_of_the_run(tmp_path, options, name, shown):
    assert facts(read_run("", str(write_run(tmp_path, options=options))))[name] == shown


def test_a_teacher_and_every_rule_of_the_filter_have_words(tmp_path):
    def words(**options):
        options = {f"algorithm.{key}": value for key, value in options.items()}
        sampling, advantages, *_ = algorithm(read_run("", str(write_run(tmp_path, options=options))))
        return sampling.partition("512 groups ")[2].removesuffix(" (dynamic sampling)."), advantages

    assert words()[0] == "differ in acc"
    for rule, kept in (
        ("mean_range", "have a mean acc between 0.01 and 0.99"),
        ("mixed", "have responses with acc above"),
    ):
        assert words(**{"filter_groups.rule": rule})[0].startswith(kept)
    assert words(**{"filter_groups.std_threshold": 0.1})[0] == "differ in acc by a standard deviation above 0.1"
    teacher = {"distillation.path": "wise"}
    assert words(**teacher)[1] == f"{ESTIMATORS['grpo']}; the teacher wise judges each token as well."
    alone = words(**teacher, **{"distillation.use_task_rewards": False})[1]
    assert alone == "The teacher wise judges each token, and no reward counts."


def test_goodput_is_that_of_the_last_step(tmp_path):
    rows = [{"step": step, "perf/goodput": step / 10, "time/lost": 30 * step} for step in range(1, 4)]
    folder = write_run(tmp_path)
    assert "Goodput" not in page_of(folder)[0].text  # a run of an earlier version
    (folder / "metrics.jsonl").write_text("".join(map(to_json_line, rows)))
    text = page_of(folder)[0].text
    assert "Goodput" in text and "30%" in text and "Lost to restarts" in text and "1 min 30 s" in text


@pytest.mark.parametrize("total", [100, -1])
def test_a_run_of_epochs_ends_at_their_number_of_steps(tmp_path, total):
    epochs = {"trainer.total_epochs": 1}
    folders = [
        write_run(tmp_path / "base" / f"seed_{steps}", steps=steps, total=total, options=epochs | {"seed": steps})
        for steps in (4, 3)
    ]
    assert "4 steps are done: still running, or stopped" in page_of(folders[0])[0].text  # of an earlier version
    for folder in folders:
        (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | {TOTAL_STEPS: 4}))
    assert "Complete: 4 of 4 steps." in page_of(folders[0])[0].text
    assert steps_left(read_run("", str(folders[1]))) == 1
    assert "unfinished: base/seed_3 (3 of 4 steps)." in page_of(*folders)[0].text


def test_runs_of_one_name_are_refused(tmp_path):
    first, second = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    with pytest.raises(InputError, match="several runs are called run: give each a name of its own"):
        report([("", str(first)), ("", str(second))], tmp_path / "page.html")


@pytest.mark.parametrize("steps", [0, -1])
def test_a_run_without_a_finished_step_says_so(tmp_path, steps):
    lines = ["model: random (llama, 25.1k parameters)", "devices: 1 x cpu", "data: 84 problems", "data.seed: 4"]
    page, _ = page_of(write_run(tmp_path, steps=steps, log="".join(f"[{TIME}] INFO: {line}\n" for line in lines)))
    model = "; ".join(lines[:3])
    assert "This run has finished no step." in page.text and model in page.text
    assert "0 of 4 steps are done: still running, or stopped; the last line of its log is from 2026-01" in page.text
    assert "There are no curves before two steps" in page.text and "No groups have been sampled yet." in page.text
    assert [text for tag, text in page.texts if tag == "h2" and text] == SECTIONS


def test_a_killed_run_is_read_up_to_its_cut_off_line(tmp_path):
    folder = write_run(tmp_path, steps=3)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rollout/acc/mean": 0.')
    (folder / "samples/step_000001.jsonl").write_text(json.dumps(sample()) + '\n{"kind": "a')
    page, text = page_of(folder)
    assert "3 of 4 steps are done: still running, or stopped" in page.text and cells(text, "Sampled") == ["60"]


def test_a_run_is_compared_with_its_recipe_or_the_defaults(tmp_path):
    recipe = Recipe("configs/mine.py", ["rollout.n"], {"rollout": {"n": 8}, "seed": 0})
    page, _ = page_of(write_run(tmp_path / "first", options={"rollout.n": 4}, recipe=recipe))
    changed = page.text.partition("Against configs/mine.py")[2]
    assert "rollout.n samples per prompt; given on the command line 8 4" in changed and "seed" not in changed
    page, _ = page_of(write_run(tmp_path / "second", options={"rollout.n": 4, "data.val_files": ("a", "b")}))
    changed = page.text.partition("Against the defaults")[2]
    assert "has not recorded which config file it began with" in changed
    assert "rollout.n samples per prompt 16 4" in changed and re.search(r"data\.val_files .*? none a, b", changed)
    assert "given on the command line" not in changed and "rollout.temperature" not in changed


def test_warnings_of_one_kind_are_one_line_and_an_error_at_the_end_is_how_the_run_ended(tmp_path):
    log = "".join(f"[2026-01-02 03:04:05] WARNING: step {step}: short of groups\n" for step in range(9))
    log += "[2026-01-02 03:04:06] WARNING: alarm at step 1: truncation: 0.9, the limit is 0.5\n"
    log += "[2026-01-02 03:04:07] ERROR: out of luck\nTraceback:\n  nothing\n"
    page, _ = page_of(write_run(tmp_path, steps=2, log=log))
    assert "warning: step 8: short of groups (the last of 9 alike)" in page.text and "step 7" not in page.text
    assert "alarm at step 1" not in page.text
    assert "2 of 4 steps are done. The run ended with an error at 2026-01-02 03:04:07: out of luck" in page.text
    solved = "the data is solved: 9 of 12 dropped groups were all right"
    page, _ = page_of(write_run(tmp_path, steps=2, log=f"{log}[{TIME}] INFO: {solved}\n"))
    assert f"2 of 4 steps are done, and the run has ended: {solved}." in page.text
    page, _ = page_of(write_run(tmp_path, steps=2, log=f"{log}[2026-01-02 03:05:05] INFO: again\n"))
    assert "2 of 4 steps are done: still running, or stopped; the last line of its log is from" in page.text


def test_the_command_writes_into_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a=b")
    main([str(folder)])
    assert capsys.readouterr().out == f"the report is in {folder / 'report.html'}\n"
    main([f"name={folder}", "--output", str(tmp_path / "new" / "page.html")])
    assert "<bdi>name</bdi>" in (tmp_path / "new" / "page.html").read_text()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "is not a directory: give the workdir of a run"),
        (lambda run: run.mkdir(), "has no config.json and no metrics.jsonl: give the workdir of a run"),
        (lambda run: (write_run(run) / "metrics.jsonl").write_text("[1]\n[2]\n"), "has a line without a step"),
        (lambda run: (write_run(run) / "config.json").write_text("{"), "config.json is damaged"),
        (lambda run: (write_run(run) / "report.html").mkdir(), "cannot be written"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, capsys, prepare, message):
    prepare(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run")])
    assert ended.value.code == 2 and message in capsys.readouterr().err
