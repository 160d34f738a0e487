"use strict";
// The rollout browser. Text of a model enters the page as text nodes alone; what it would hide is
// spelled out. Only the rows in sight are in the document, so that many thousands scroll at once.
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("rollouts").textContent);
  const total = data.ids.length;
  if (total === 0) return;

  const ROW_HEIGHT = 58;
  const SPARE_ROWS = 6;
  const HEAT_BELOW = [-0.105, -0.693, -1.609, -2.996, -4.605]; // ln of 0.9, 0.5, 0.2, 0.05, 0.01
  const HIDDEN = /\p{C}|(?! )\p{Z}/gu; // control, format, unassigned; every space but the plain one
  const place = new Map(data.ids.map((id, index) => [id, index]));
  const list = byId("list");
  const rows = byId("rows");
  const detail = byId("detail");
  const status = byId("found");
  const inputs = ["search", "run", "role", "outcome", "first", "last", "low", "high"]
    .map(byId).filter(Boolean);
  let found = [];
  let selected = 0;
  let heat = true;
  let haystacks = null;

  function make(tag, className, ...children) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function escaped(character) {
    const code = character.codePointAt(0);
    if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
    if (code < 65536) return "\\u" + code.toString(16).padStart(4, "0");
    return "\\U" + code.toString(16).padStart(8, "0");
  }

  // Return nodes for a text: hidden characters stand as escapes, marked as such.
  function shown(text) {
    const nodes = [];
    let start = 0;
    for (const match of text.matchAll(HIDDEN)) {
      if (match[0] === "\n" || match[0] === "\t") continue;
      if (match.index > start) nodes.push(text.slice(start, match.index));
      nodes.push(make("span", "escape", escaped(match[0])));
      start = match.index + match[0].length;
    }
    if (start < text.length) nodes.push(text.slice(start));
    return nodes;
  }

  function figure(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  }

  // ---- finding

  function haystack(index) {
    haystacks ??= new Array(total);
    if (haystacks[index] === undefined) {
      const prompt = data.prompts[data.prompt_id[index]];
      const asked = prompt ? prompt.messages.map((message) => message[1]).join("\n") : "";
      haystacks[index] =
        `${data.ids[index]}\n${data.prompt_id[index]}\n${data.text[index]}\n${asked}`.toLowerCase();
    }
    return haystacks[index];
  }

  function limit(id, otherwise) {
    const text = byId(id).value.trim();
    const number = Number(text);
    return text === "" || Number.isNaN(number) ? otherwise : number;
  }

  function choice(id) {
    const select = byId(id);
    return select ? select.value : "";
  }

  function find() {
    const words = byId("search").value.toLowerCase();
    const [run, role, outcome] = ["run", "role", "outcome"].map(choice);
    const first = limit("first", -Infinity), last = limit("last", Infinity);
    const low = limit("low", null), high = limit("high", null);
    found = [];
    for (let index = 0; index < total; index++) {
      const iteration = data.iteration[index], reward = data.reward[index];
      if (iteration < first || iteration > last) continue;
      if (run && data.run_id[index] !== run) continue;
      if (role && roleName(index) !== role) continue;
      if (outcome === "replayed" ? !data.picks[data.ids[index]]
        : outcome && data.outcome[index] !== outcome) continue;
      if (low !== null && !(reward !== null && reward >= low)) continue;
      if (high !== null && !(reward !== null && reward <= high)) continue;
      if (words && !haystack(index).includes(words)) continue;
      found.push(index);
    }
    status.textContent = `${found.length.toLocaleString("en")} of ${total.toLocaleString("en")} on this page`;
    list.scrollTop = 0;
    selected = 0;
    draw();
    show(found.length ? found[0] : null);
  }

  function roleName(index) {
    return data.arm[index] ? `${data.role[index]}: ${data.arm[index]}` : data.role[index];
  }

  // ---- list

  function draw() {
    const height = list.clientHeight || 600;
    const start = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const end = Math.min(found.length, start + Math.ceil(height / ROW_HEIGHT) + 2 * SPARE_ROWS);
    rows.style.height = `${found.length * ROW_HEIGHT}px`;
    rows.replaceChildren(...found.slice(start, end).map((index, n) => line(index, start + n)));
    const current = byId(`row-${selected}`);
    if (current) list.setAttribute("aria-activedescendant", current.id);
    else list.removeAttribute("aria-activedescendant");
  }

  function line(index, number) {
    const row = make("div", "row",
      make("span", `dot ${data.outcome[index]}`),
      make("span", "what", ...shown(data.text[index].slice(0, 160).replace(/[\n\t]/g, " ")
        || data.error[index] || "(empty)")),
      make("span", "facts", `iteration ${data.iteration[index]} · ${roleName(index)} · `
        + `${data.outcome[index]}`
        + (data.reward[index] === null ? "" : ` · ${figure(data.reward[index])}`)
        + (data.picks[data.ids[index]] ? " · replayed" : "")));
    row.id = `row-${number}`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(number === selected));
    row.setAttribute("aria-setsize", String(found.length));
    row.setAttribute("aria-posinset", String(number + 1));
    row.style.transform = `translateY(${number * ROW_HEIGHT}px)`;
    row.addEventListener("click", () => select(number));
    return row;
  }

  function select(number) {
    if (!found.length) return;
    selected = Math.max(0, Math.min(found.length - 1, number));
    const top = selected * ROW_HEIGHT, seen = list.clientHeight;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_HEIGHT > list.scrollTop + seen) list.scrollTop = top + ROW_HEIGHT - seen;
    draw();
    show(found[selected]);
  }

  function move(event) {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
      Home: -found.length, End: found.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    select(selected + steps[event.key]);
  }

  // Go to a rollout of this page, also where the filters hide it.
  function visit(id) {
    const index = place.get(id);
    if (index === undefined) return;
    let number = found.indexOf(index);
    if (number < 0) {
      for (const input of inputs) input.value = "";
      find();
      number = found.indexOf(index);
    }
    select(number);
  }

  // ---- detail

  function show(index) {
    if (index === null) {
      detail.replaceChildren(make("p", "quiet", "Nothing fits. Widen the filters."));
      return;
    }
    const id = data.ids[index];
    const parts = [
      heading(index), relations(index), asked(index), answered(index),
      part("Scores over time", grid(
        ["iteration", "scorer", "version", "kind", "value", "status", "feedback", "judged by"],
        (data.scores[id] || []).map(([run, iteration, scorer, version, kind, value, state, why]) =>
          [iteration, scorer, version, kind, value, state, why, run]))),
      part("Review", reviewed(id)),
      part("Planned into steps", grid(
        ["run", "iteration", "step", "as", "state", "age", "reward", "advantage", "tokens", "weight"],
        data.steps[id] || [])),
      part("Picked for replay", grid(
        ["run", "iteration", "unit", "given tokens", "value", "probability"],
        (data.picks[id] || []).map((pick) => pick.slice(0, 6)))),
      make("p", "quiet", "All of it: ", make("code", "", `rrl show ${id}`)),
    ];
    detail.replaceChildren(...parts.filter((child) => child !== null));
    detail.scrollTop = 0;
  }

  function heading(index) {
    const facts = [
      ["outcome", data.outcome[index]],
      ["reward", figure(data.reward[index])],
      ["role", roleName(index)],
      ["iteration", data.iteration[index]],
      ["policy version", data.policy_version[index]],
      ["tokens", data.num_completion_tokens[index]],
      ["ended by", data.finish_reason[index]],
      ["temperature", figure(data.temperature[index])],
      ["run", data.source_run_id[index]],
    ];
    return make("header", "", make("h3", "", ...shown(data.ids[index])),
      make("dl", "facts", ...facts.map(([name, value]) =>
        make("div", "", make("dt", "", name), make("dd", "", ...shown(String(value)))))));
  }

  function relations(index) {
    const id = data.ids[index], parent = data.parent_id[index];
    const links = [];
    if (parent in data.states) {
      const [from, given, cut] = data.states[parent];
      links.push([from, `continues after ${given} tokens (${cut})`]);
    } else if (parent) {
      links.push([parent, { second_attempt: "follows the review", review: "reviews" }[data.role[index]]
        || "answers"]);
    }
    for (const [child, role, iteration] of data.children[id] || []) {
      links.push([child, `${role} in iteration ${iteration}`]);
    }
    if (!links.length) return null;
    return part("Before and after", make("ul", "links", ...links.map(([other, what]) =>
      make("li", "", `${what}: `, link(other)))));
  }

  function link(id) {
    if (!place.has(id)) return make("span", "quiet", ...shown(id), " (not on this page)");
    const button = make("button", "link", ...shown(id));
    button.type = "button";
    button.addEventListener("click", () => visit(id));
    return button;
  }

  function asked(index) {
    const prompt = data.prompts[data.prompt_id[index]];
    if (!prompt) return part("Prompt", make("p", "quiet", ...shown(data.prompt_id[index])));
    const facts = [prompt.task, prompt.difficulty, prompt.answer === null ? "no reference answer"
      : `reference answer ${prompt.answer}`, data.prompt_id[index]];
    return part("Prompt", ...prompt.messages.map(([role, content]) =>
      make("div", "message", make("span", "speaker", ...shown(role)),
        make("pre", "", ...shown(content)))),
      make("p", "quiet", ...shown(facts.filter(Boolean).join(" · "))));
  }

  function answered(index) {
    const tokens = data.tokens[index];
    const notes = [];
    if (data.prefix_tokens[index]) {
      notes.push(`The first ${data.prefix_tokens[index]} tokens were given; the tokens below come after them.`);
    }
    if (data.cut[index]) notes.push(`${data.cut[index]} more characters are not on this page.`);
    if (data.error[index]) notes.push(data.error[index]);
    const canHeat = tokens && tokens.ids.length > 0;
    const hasHeat = canHeat && heat && tokens.logprobs !== null;
    if (canHeat && tokens.logprobs === null) notes.push(`No log-probs: ${tokens.reason || "none were stored"}.`);
    if (hasHeat && tokens.ids.length < data.num_completion_tokens[index]) {
      notes.push(`${data.num_completion_tokens[index] - tokens.ids.length} more tokens are not on this page.`);
    }
    const title = make("h4", "", "Completion ");
    if (canHeat && tokens.logprobs !== null) title.append(toggle(index));
    const hasPieces = Boolean(data.pieces[data.source_run_id[index]]);
    return make("section", "", title,
      hasHeat && hasPieces ? null : make("pre", "completion", ...shown(data.text[index])),
      hasHeat ? legend() : null,
      hasHeat ? heated(index, tokens) : null,
      ...notes.map((note) => make("p", "quiet", ...shown(note))));
  }

  function toggle(index) {
    const button = make("button", "toggle", heat ? "hide log-probs" : "show log-probs");
    button.type = "button";
    button.addEventListener("click", () => {
      heat = !heat;
      show(index);
      detail.querySelector(".toggle").focus();
    });
    return button;
  }

  function level(logprob) {
    let n = 0;
    while (n < HEAT_BELOW.length && logprob < HEAT_BELOW[n]) n += 1;
    return n;
  }

  function heated(index, tokens) {
    const pieces = data.pieces[data.source_run_id[index]];
    return make("pre", `completion ${pieces ? "" : "ids"}`, ...tokens.ids.map((token, n) => {
      const piece = pieces && token in pieces ? pieces[token] : null;
      const text = piece === null ? [`${token}`] : shown(piece);
      if (tokens.logprobs[n] === null) {
        const given = make("span", "token given", ...text);
        given.title = `token ${token}, given between two turns`;
        return given;
      }
      const logprob = tokens.logprobs[n] / 100;
      const node = make("span", `token h${level(logprob)}`, ...text);
      node.title = `token ${token}, log-prob ${logprob.toFixed(2)}, probability ${Math.exp(logprob).toPrecision(2)}`;
      return node;
    }));
  }

  function legend() {
    const names = ["90 % or more", "50", "20", "5", "1", "less"];
    return make("p", "heat", "Probability of each token when it was sampled: ",
      ...names.map((name, n) => make("span", `token h${n}`, name)));
  }

  function reviewed(id) {
    const notes = data.reviews[id] || [];
    if (!notes.length) return null;
    return make("div", "", ...notes.map(([state, leak, wrong, advice, memory]) => {
      const earlier = JSON.parse(memory).length;
      return make("div", "", make("p", "quiet", `${state} · leak: ${leak} · shown ${earlier} earlier reviews`),
        wrong === null ? null : make("pre", "", "What went wrong: ", ...shown(wrong)),
        advice === null ? null : make("pre", "", "What to do: ", ...shown(advice)));
    }));
  }

  function part(title, ...children) {
    const filled = children.filter((child) => child !== null);
    return filled.length ? make("section", "", make("h4", "", title), ...filled) : null;
  }

  function grid(names, lines) {
    if (!lines.length) return null;
    const head = make("thead", "", make("tr", "", ...names.map((name) => make("th", "", name))));
    const body = make("tbody", "", ...lines.map((cells) => make("tr", "", ...cells.map((cell) =>
      make("td", typeof cell === "number" ? "number" : figure(cell).length <= 28 ? "short" : "",
        ...shown(figure(cell)))))));
    const box = make("div", "scroll", make("table", "", head, body));
    box.tabIndex = 0;
    return box;
  }

  // ---- start

  let waiting = 0;
  for (const input of inputs) {
    input.addEventListener("input", () => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(find);
    });
  }
  byId("filters").addEventListener("reset", () => requestAnimationFrame(find));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("keydown", move);
  new ResizeObserver(draw).observe(list);
  find();
  if (place.has(location.hash.slice(1))) visit(location.hash.slice(1));
  document.documentElement.dataset.ready = "true";
})();
