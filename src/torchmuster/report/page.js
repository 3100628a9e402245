"use strict";
(function () {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  let theme = 0;
  button.hidden = false;
  button.addEventListener("click", function () {
    theme = (theme + 1) % themes.length;
    if (theme === 0) root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", themes[theme]);
    button.textContent = "Theme: " + themes[theme];
  });

  function show(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size >= 1e6 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(6)));
  }

  // A cursor on each plot with lines: the pointer moves it, and so do the arrow keys.
  document.querySelectorAll("svg[data-x]").forEach(function (svg) {
    const path = svg.querySelector("path[data-read]");
    const cursor = svg.querySelector(".cursor");
    const box = svg.closest(".scroll");
    const told = svg.closest("figure").querySelector("output");
    const [x0, x1, left, right] = svg.dataset.x.split(" ").map(Number);
    const [y0, y1, bottom, top, isLog] = svg.dataset.y.split(" ").map(Number);
    const names = svg.dataset.axes.split("|");
    const points = Array.from(path.getAttribute("d").matchAll(/[ML]([\d.-]+) ([\d.-]+)/g), function (found) {
      return [Number(found[1]), Number(found[2])];
    });
    if (!points.length) return;
    let here = points.length - 1;
    function value(y) {
      const share = (y - bottom) / (top - bottom);
      return isLog ? Math.pow(10, Math.log10(y0) + share * (Math.log10(y1) - Math.log10(y0))) : y0 + share * (y1 - y0);
    }
    function move(number) {
      here = Math.min(Math.max(number, 0), points.length - 1);
      const [x, y] = points[here];
      cursor.setAttribute("visibility", "visible");
      cursor.querySelector("path").setAttribute("transform", "translate(" + x + " 0)");
      cursor.querySelector("circle").setAttribute("cx", x);
      cursor.querySelector("circle").setAttribute("cy", y);
      const place = x0 + ((x - left) / (right - left)) * (x1 - x0);
      const where = names[0] === "step" ? "step " + Math.round(place) : show(place) + " s " + names[0];
      told.textContent = where + ": about " + show(value(y)) + " " + (names[1] || "");
    }
    svg.addEventListener("pointermove", function (event) {
      const area = svg.getBoundingClientRect();
      const x = ((event.clientX - area.left) / area.width) * svg.viewBox.baseVal.width;
      let best = 0;
      points.forEach(function (point, number) {
        if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = number;
      });
      move(best);
    });
    box.addEventListener("keydown", function (event) {
      const far = Math.max(1, Math.round(points.length / 20));
      const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - far, PageDown: here + far, Home: 0, End: points.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      move(to);
    });
  });

  // Everything is printed, also what is folded.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details:not(.long)").forEach(function (part) { part.open = true; });
  });
})();
