"use strict";
// The axis of the curves, and the values under the pointer. Without this script the page shows everything but these.
const figures = document.querySelector(".figures");
for (const choice of document.querySelectorAll(".axes")) choice.hidden = false;
for (const button of document.querySelectorAll(".axes input")) {
  const choose = () => { if (button.checked) figures.dataset.axis = button.value; };
  button.addEventListener("change", choose);
  choose();
}
for (const picture of document.querySelectorAll("svg[data-lines]")) {
  const lines = JSON.parse(picture.dataset.lines);
  const readout = picture.parentElement.querySelector("output");
  const last = readout.textContent;
  const cursor = picture.querySelector(".cursor");
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = places.length - 1;
  const nearest = (list, x) =>
    list.reduce((best, one, index) => (Math.abs(one - x) < Math.abs(list[best] - x) ? index : best), 0);
  const read = (x) => {
    const found = new Map();
    for (const line of lines.filter((line) => line.x.length)) {
      const index = nearest(line.x, x);
      const step = line.step[index];
      found.set(step, [...(found.get(step) || []), (line.letter + " " + line.value[index]).trim()]);
    }
    return [...found].map(([step, values]) => "step " + step + ": " + values.join(", ")).join("; ");
  };
  const show = (index) => {
    at = Math.min(Math.max(index, 0), places.length - 1);
    cursor.setAttribute("x1", places[at]);
    cursor.setAttribute("x2", places[at]);
    cursor.removeAttribute("hidden");
    readout.textContent = read(places[at]);
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    show(nearest(places, (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width));
  });
  const leave = () => { cursor.setAttribute("hidden", ""); readout.textContent = last; };
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  picture.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: places.length - 1 };
    if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
  });
}
