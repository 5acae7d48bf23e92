// Plays the recorded run of the pool: pages claimed, shared, copied, kept and returned.
"use strict";
(() => {
  const { pages, page_size: pageSize, moments } = JSON.parse(document.getElementById("trace").textContent);
  const pool = document.querySelector(".pool");
  const find = (selector) => pool.querySelector(selector);
  const grid = find(".pages"), list = find(".sequences"), slider = find("input"), play = find(".play");

  const INKS = ["blue", "vermilion", "green", "purple", "amber", "sky", "pink", "slate"];
  const COLUMNS = 8, WIDTH = 44, HEIGHT = 36, GAP = 5;
  const CHANGE_MS = 1600, TOKEN_MS = 350; // who comes or goes is worth a longer look

  const ink = (name) => `var(--${INKS[(name.charCodeAt(0) - 65) % INKS.length]})`;
  const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  /** Page by page: who holds it, how many tokens are in it, whether it is kept, and backed. */
  function stateOf(moment) {
    const cached = new Set(moment.cached), backed = new Set(moment.backed);
    const state = new Map();
    for (let id = 1; id <= pages; id++) {
      state.set(id, { holders: [], tokens: 0, cached: cached.has(id), backed: backed.has(id) });
    }
    for (const sequence of moment.sequences) {
      sequence.pages.forEach((id, index) => {
        const page = state.get(id);
        page.holders.push(sequence.name);
        page.tokens = Math.max(page.tokens, Math.min(pageSize, sequence.tokens - index * pageSize));
      });
    }
    return state;
  }

  function drawPage(id, page, before) {
    const x = ((id - 1) % COLUMNS) * WIDTH, y = Math.floor((id - 1) / COLUMNS) * HEIGHT;
    const width = WIDTH - GAP, height = HEIGHT - GAP;
    const held = page.holders.length > 0;
    const fresh = before && before.holders.join() !== page.holders.join();
    const classes = [held && "held", page.cached && "kept", !page.backed && "unbacked", fresh && "fresh"];
    const stripe = width / page.holders.length;
    const filled = (height * page.tokens) / pageSize;
    const fill = page.holders.map((name, index) =>
      `<rect x="${index * stripe}" width="${stripe}" height="${height}" fill="${ink(name)}" opacity="0.28"/>` +
      `<rect x="${index * stripe}" y="${height - filled}" width="${stripe}" height="${filled}" fill="${ink(name)}"/>`);
    const label = held ? page.holders.join("") : page.cached ? "kept" : "";
    return `<g class="${classes.filter(Boolean).join(" ")}" transform="translate(${x + 1} ${y + 1})">${fill.join("")}` +
      (page.cached ? `<rect width="${width}" height="${height}" fill="url(#kept)"/>` : "") +
      `<rect class="edge" width="${width}" height="${height}" rx="2"/>` +
      `<text class="id" x="3" y="7">${id}</text>` +
      `<text x="${width / 2}" y="${height / 2 + 3}">${label}</text></g>`;
  }

  function drawSequence(sequence) {
    return `<li><b style="background:${ink(sequence.name)}">${sequence.name}</b>` +
      `<span>${counted(sequence.tokens, "token")} in ${counted(sequence.pages.length, "page")}</span>` +
      `<span class="ids">${sequence.pages.join(" ")}</span></li>`;
  }

  const PATTERN = '<defs><pattern id="kept" width="5" height="5" patternUnits="userSpaceOnUse" ' +
    'patternTransform="rotate(45)"><rect width="1.5" height="5" fill="var(--muted)"/></pattern></defs>';

  let at = 0;
  function show(index) {
    at = index;
    const moment = moments[at], state = stateOf(moment);
    const before = at > 0 ? stateOf(moments[at - 1]) : null;
    const drawn = [...state].map(([id, page]) => drawPage(id, page, before && before.get(id)));
    grid.innerHTML = PATTERN + drawn.join("");
    const all = [...state.values()];
    const used = all.filter((page) => page.holders.length).length;
    const counts = {
      used,
      cached: moment.cached.length,
      free: pages - used - moment.cached.length,
      unbacked: pages - moment.backed.length,
    };
    for (const place of pool.querySelectorAll("[data-count]")) place.textContent = counts[place.dataset.count];
    grid.setAttribute("aria-label", `The pool's pages: ${counts.used} used, ${counts.cached} kept, ${counts.free} free`);
    find(".said").textContent = moment.said;
    const waiting = moment.waiting.map((name) => `<li class="waits"><b>${name}</b><span>waits for pages</span></li>`);
    list.innerHTML = moment.sequences.map(drawSequence).join("") + waiting.join("");
    slider.value = at;
    slider.setAttribute("aria-valuetext", `step ${at + 1} of ${moments.length}: ${moment.said}`);
    find(".step").textContent = `${at + 1} / ${moments.length}`;
    find(".cursor").setAttribute("d", `M${(100 * at) / (moments.length - 1)} 0V24`);
  }

  /** How many pages are used, and have memory behind them, over the whole run. */
  function drawCourse() {
    const x = (index) => (100 * index) / (moments.length - 1);
    const y = (count) => 24 - (22 * count) / pages;
    const path = (counts) => counts.map((count, index) => `L${x(index).toFixed(2)} ${y(count).toFixed(2)}`).join("");
    const used = moments.map((moment) => new Set(moment.sequences.flatMap((sequence) => sequence.pages)).size);
    const backed = moments.map((moment) => moment.backed.length);
    find(".course").innerHTML =
      `<path class="used" d="M0 24${path(used)}V24Z"/><path class="backed" d="M0 ${y(backed[0])}${path(backed)}"/>` +
      '<path class="cursor"/>';
  }

  const who = (moment) => [...moment.sequences.map((sequence) => sequence.name), "|", ...moment.waiting].join();
  let timer = null;
  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    find(".said").setAttribute("aria-live", "polite"); // read out steps, but not a film
  }
  function tick() {
    if (at === moments.length - 1) return stop();
    show(at + 1);
    const changed = who(moments[at]) !== who(moments[at - 1]);
    timer = setTimeout(tick, changed ? CHANGE_MS : TOKEN_MS);
  }
  function start() {
    if (at === moments.length - 1) show(0);
    play.textContent = "Pause";
    find(".said").setAttribute("aria-live", "off");
    timer = setTimeout(tick, TOKEN_MS);
  }
  function go(index) {
    stop();
    show(Math.min(Math.max(index, 0), moments.length - 1));
  }

  play.addEventListener("click", () => (timer === null ? start() : stop()));
  find(".back").addEventListener("click", () => go(at - 1));
  find(".on").addEventListener("click", () => go(at + 1));
  slider.max = moments.length - 1;
  slider.addEventListener("input", () => go(Number(slider.value)));

  drawCourse();
  const busiest = moments.findIndex((moment) => moment.sequences.length > 4);
  go(Math.max(busiest, 0));
  // It begins by itself when it comes into view, once, for those who like things to move.
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches && "IntersectionObserver" in window) {
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watch.disconnect();
      show(0);
      start();
    }, { threshold: 0.6 });
    watch.observe(grid);
  }
  addEventListener("beforeprint", stop);
})();
