"""The web page over the job store: forms submit to the desk, everything shown is polled from the store; knows no model and no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from gradio.utils import get_upload_folder

from videogen.serve.api import Services
from videogen.serve.figures import Figures
from videogen.serve.filewall import FileWall
from videogen.serve.forms import PICTURE_KINDS, FormField, form_fields, lengths, sizes
from videogen.serve.handlers import Handlers
from videogen.serve.html import CSS, HEAD
from videogen.serve.library import Library
from videogen.serve.reports import Reports

QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}  # Gradio's queue looks 20 times a second
MAX_UPLOAD = "64mb"


def mount(api: FastAPI, services: Services, reports: Path | None) -> FastAPI:
    """The application with the page at `/`. A server with keys asks for a name and its key first."""
    figures = Figures(services.store, services.desk.source, services.options.clips, Reports(reports))
    page = build(Handlers(services, figures), Library(services, figures))
    login = None if services.keys.is_open else services.keys.login
    root = services.options.root
    mounted: FastAPI = gr.mount_gradio_app(
        api,
        page,
        path="/",
        server_name=services.options.host,
        server_port=services.options.port,
        auth=login,
        auth_message="The name and its key, as the server was started with them.",
        allowed_paths=[],  # clips are served by job id and signed link, never by path
        blocked_paths=[str(root)],
        show_error=False,
        max_file_size=MAX_UPLOAD,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
        ssr_mode=False,
        css=CSS,
        head=HEAD,
    )
    mounted.add_middleware(FileWall, folder=Path(get_upload_folder()))
    return mounted


def build(handlers: Handlers, library: Library) -> gr.Blocks:
    """The whole page."""
    with gr.Blocks(title="videogen", analytics_enabled=False, delete_cache=(3600, 86_400)) as page:
        header = gr.HTML(elem_id="vg-header")
        shown, seen = gr.State(""), gr.State({})
        with gr.Tabs():
            with gr.Tab("Render", elem_id="vg-tab-render"):
                form, status, player = _render_tab(handlers, shown)
            with gr.Tab("Queue", elem_id="vg-tab-queue"):
                cards, chosen = _queue_tab(handlers)
            with gr.Tab("Gallery", elem_id="vg-tab-gallery"):
                _gallery_tab(handlers, library, form)
            with gr.Tab("Compare", elem_id="vg-tab-compare"):
                _compare_tab(library)
            with gr.Tab("Bench and quality", elem_id="vg-tab-bench"):
                _bench_tab(library)
            with gr.Tab("System", elem_id="vg-tab-system"):
                _system_tab(library, page)
        polled = [header, status, player, cards, chosen, shown, seen]
        gr.Timer(1.0).tick(handlers.tick, [shown, seen], polled, **QUIET)
        page.load(handlers.load, None, polled, **QUIET)
        page.load(handlers.recipes_again, form.recipe, [form.recipe, form.told], **QUIET)
    page.queue(default_concurrency_limit=20, max_size=500)
    return page


class Form:
    """The inputs of the Render tab: one per request field, and what is not a field."""

    def __init__(self, handlers: Handlers) -> None:
        self.fields = form_fields()
        self.inputs: dict[str, Any] = {}
        for each in (f for f in self.fields if f.is_main):
            self.inputs[each.name] = _input(each, handlers)
        self.lines = gr.Checkbox(label="One clip per line of the prompt", elem_id="vg-lines")
        recipes = handlers.recipes()
        self.recipe = gr.Radio(recipes, value=recipes[0][1], label="Recipe", elem_id="vg-recipe")
        self.told = gr.Markdown(handlers.told_recipe(recipes[0][1]), elem_id="vg-recipe-told")
        self.count = gr.Markdown(elem_id="vg-count")
        self.submit = gr.Button("Add to queue (Ctrl-Enter)", variant="primary", elem_id="vg-submit")
        self.message = gr.HTML(elem_id="vg-message")
        with gr.Accordion("Pictures", open=False, elem_id="vg-pictures"):
            for each in (f for f in self.fields if f.kind in PICTURE_KINDS):
                self.inputs[each.name] = _input(each, handlers)
        with gr.Accordion("More", open=False, elem_id="vg-more"):
            names = sorted(handlers.desk.adapters)
            told = "their contract sets steps and shifts" if names else "none: start the server with --adapters DIR"
            self.adapters = gr.Dropdown(names, multiselect=True, label="Adapters", info=told, elem_id="vg-adapters")
            self.repeats = gr.Number(1, label="Clips per prompt", precision=0, minimum=1, maximum=50, elem_id="vg-repeats")
            for each in (f for f in self.fields if not f.is_main and f.kind not in PICTURE_KINDS):
                self.inputs[each.name] = _input(each, handlers)

    @property
    def names(self) -> list[str]:
        """The request's fields, in the order of `values`."""
        return list(self.inputs)

    @property
    def values(self) -> list[Any]:
        """Every input: the fields, then adapters, recipe, lines, repeats."""
        return [*self.inputs.values(), self.adapters, self.recipe, self.lines, self.repeats]

    @property
    def settable(self) -> list[Any]:
        """What a clip's settings are put back into: the fields but pictures, then adapters and recipe."""
        kinds = {each.name: each.kind for each in self.fields}
        return [*(item for name, item in self.inputs.items() if kinds[name] not in PICTURE_KINDS), self.adapters, self.recipe]


def _input(each: FormField, handlers: Handlers) -> Any:
    common: dict[str, Any] = {"label": each.label, "elem_id": f"vg-{each.name}"}
    if each.kind in PICTURE_KINDS:  # as bytes: the desk decodes them, under limits
        count = "multiple" if each.kind == "pictures" else "single"
        return gr.File(file_count=count, file_types=["image"], type="binary", height=120, **common)
    common["info"] = each.info
    if each.name == "seconds":
        least, usual, most = lengths(handlers.desk.family)
        return gr.Slider(least, most, value=min(most, max(least, usual)), step=0.1, **common)
    if each.kind == "size":
        return gr.Dropdown(sizes(handlers.desk.family), value="", **common)
    if each.kind == "flag":
        return gr.Checkbox(**common)
    if each.kind in ("whole", "number"):
        return gr.Number(-1 if each.name == "seed" else 0, precision=0 if each.kind == "whole" else None, **common)
    return gr.Textbox(lines=4 if each.is_main else 1, max_length=20_000, **common)


def _render_tab(handlers: Handlers, shown: Any) -> tuple[Form, Any, Any]:
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            form = Form(handlers)
            message, submit = form.message, form.submit
            with gr.Row():
                both = gr.Button("Compare with exact", elem_id="vg-both")
                again = gr.Button("Seed of the clip shown", elem_id="vg-same-seed")
        with gr.Column(scale=3, min_width=320):
            status = gr.HTML(elem_id="vg-progress")
            player = gr.HTML(elem_id="vg-player")
            with gr.Row():
                cancel = gr.Button("Cancel this clip", variant="stop", elem_id="vg-cancel")
                use = gr.Button("Use its settings", elem_id="vg-use")
                vary = gr.Button("Four more seeds", elem_id="vg-vary")
    handlers.names = form.names
    known: dict[str, Any] = QUIET | {"api_name": "submit", "api_visibility": "undocumented"}
    submit.click(handlers.submit, form.values, [message, shown], **known)
    both.click(handlers.submit_pair, form.values, [message, shown], **QUIET)
    cancel.click(handlers.cancel, shown, message, **QUIET)
    use.click(handlers.settings_of(form.names), shown, form.settable, **QUIET)
    again.click(handlers.seed_of, shown, form.inputs["seed"], **QUIET)
    vary.click(handlers.vary, shown, message, **QUIET)
    form.recipe.change(handlers.told_recipe, form.recipe, form.told, **QUIET)
    counted = [*form.settable, form.lines, form.repeats]
    gr.on([item.change for item in counted], handlers.count, form.values, form.count, trigger_mode="always_last", **QUIET)
    return form, status, player


def _queue_tab(handlers: Handlers) -> tuple[Any, Any]:
    chosen = gr.Dropdown([], label="Job", elem_id="vg-job", info="choose one, then what to do with it")
    told = gr.HTML(elem_id="vg-queue-message")
    with gr.Row():
        acts = [gr.Button(label, elem_id=f"vg-{name}", min_width=120) for name, label in handlers.ACTS.items()]
    with gr.Accordion("Edit a waiting job", open=False):
        prompt = gr.Textbox(label="New prompt", elem_id="vg-edit-prompt", max_length=20_000)
        seed = gr.Number(-2, label="New seed", info="-2 keeps it, -1 draws one", precision=0, elem_id="vg-edit-seed")
        recipe = gr.Dropdown(["", *handlers.desk.recipes()], value="", label="New recipe", info="empty keeps it", elem_id="vg-edit-recipe")
        save = gr.Button("Save changes", elem_id="vg-save")
    with gr.Row():
        pause, go = gr.Button("Pause the queue", elem_id="vg-pause"), gr.Button("Go on", elem_id="vg-go")
    with gr.Accordion("Save and load", open=False, elem_id="vg-files"):
        write, saved = gr.Button("Make a file of the waiting jobs", elem_id="vg-save-queue"), gr.HTML(elem_id="vg-saved")
        file = gr.File(label="A job file (.jsonl)", file_types=[".jsonl"], type="binary", height=120, elem_id="vg-queue-file")
        read = gr.Button("Add its jobs to the queue", elem_id="vg-load-queue")
    cards = gr.HTML(elem_id="vg-queue")
    write.click(handlers.save, None, saved, **QUIET)
    read.click(handlers.load_file, file, told, **QUIET)
    for name, button in zip(handlers.ACTS, acts):
        button.click(handlers.act(name), chosen, told, **QUIET)
    save.click(handlers.edit, [chosen, prompt, seed, recipe], told, **QUIET)
    pause.click(handlers.pause, None, told, **QUIET)
    go.click(handlers.go_on, None, told, **QUIET)
    return cards, chosen


def _gallery_tab(handlers: Handlers, library: Library, form: Form) -> None:
    with gr.Row():
        words = gr.Textbox(label="Words in the prompt, recipe or seed", elem_id="vg-filter")
        number = gr.Number(1, label="Page", precision=0, minimum=1, elem_id="vg-page")
    look = gr.Button("Show", elem_id="vg-gallery-show")
    clips = gr.HTML(elem_id="vg-gallery")
    chosen = gr.Dropdown([], label="Clip", elem_id="vg-clip")
    with gr.Row():
        use = gr.Button("Use its settings in Render", elem_id="vg-gallery-use")
        sure = gr.Checkbox(label="Yes, delete the clip and its file", elem_id="vg-sure")
        delete = gr.Button("Delete", variant="stop", elem_id="vg-delete")
    told = gr.HTML(elem_id="vg-gallery-message")
    gr.on([look.click, words.submit, number.change], library.gallery, [words, number], [clips, chosen], **QUIET)
    use.click(handlers.settings_of(form.names), chosen, form.settable, **QUIET)
    delete.click(library.delete, [chosen, sure], told, **QUIET).then(library.gallery, [words, number], [clips, chosen], **QUIET)


def _compare_tab(library: Library) -> None:
    with gr.Row():
        left, right = (gr.Dropdown([], label=f"Clip {name}", elem_id=f"vg-{name.lower()}") for name in ("A", "B"))
    with gr.Row():
        newest = gr.Button("Newest pair: one prompt and seed, two recipes", elem_id="vg-pair")
        show = gr.Button("Compare", variant="primary", elem_id="vg-compare")
    outputs: Sequence[Any] = (gr.HTML(elem_id="vg-compared"), gr.HTML(elem_id="vg-numbers"))
    newest.click(library.newest_pair, None, [left, right], **QUIET).then(library.compare, [left, right], [*outputs], **QUIET)
    show.click(library.compare, [left, right], [*outputs], **QUIET)


def _system_tab(library: Library, page: gr.Blocks) -> None:
    system = gr.HTML(elem_id="vg-system")
    gr.Button("Look again", elem_id="vg-system-again").click(library.system, None, system, **QUIET)
    gr.Markdown("### What really runs: `videogen doctor`")
    found = gr.HTML(elem_id="vg-doctor")
    told = gr.State("")
    gr.Button("Ask a worker to look", elem_id="vg-doctor-ask").click(library.ask_doctor, None, found, **QUIET)
    gr.Timer(3.0).tick(library.doctor_again, told, [found, told], **QUIET)
    page.load(library.system, None, system, **QUIET)


def _bench_tab(library: Library) -> None:
    with gr.Row():
        names = library.reports.names()
        value = names[0] if names else None
        chosen = gr.Dropdown(names, value=value, label="Report", elem_id="vg-report", info="from the server's --reports folder")
        again = gr.Button("Look for reports", elem_id="vg-report-again")
    none = "No report chosen. `videogen bench` and `videogen eval` write them."
    text = gr.Markdown(library.report(value) if value else none, elem_id="vg-report-text")
    chosen.change(library.report, chosen, text, **QUIET)
    again.click(library.report_names, None, chosen, **QUIET)
