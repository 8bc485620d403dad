// The search of names.html: no library, no network. NAMES comes from names-data.js.
(function () {
  "use strict";
  var MOST = 200;
  var query = document.getElementById("names-query");
  var told = document.getElementById("names-told");
  var found = document.getElementById("names-found");

  // Better first: the name itself, then names that begin with the text, then names that hold it.
  function rank(name, text) {
    var at = name.slice(name.lastIndexOf(".") + 1).toLowerCase().indexOf(text);
    return at === 0 ? (name.length === text.length ? 0 : 1) : at > 0 || name.toLowerCase().indexOf(text) >= 0 ? 2 : -1;
  }

  function add(parent, tag, text) {
    var made = document.createElement(tag);
    made.textContent = text;
    return parent.appendChild(made);
  }

  function search() {
    var text = query.value.trim().toLowerCase();
    var hits = NAMES.names.map(function (one) { return [text ? rank(one[0], text) : -1, one]; })
      .filter(function (hit) { return hit[0] >= 0; })
      .sort(function (a, b) { return a[0] - b[0]; });
    found.textContent = "";
    told.textContent = !text ? "" : hits.length > MOST ? "the first " + MOST + " of " + hits.length : hits.length + " found";
    hits.slice(0, MOST).forEach(function (hit) {
      var one = hit[1], path = NAMES.files[one[2]];
      var link = add(add(found, "dt", ""), "a", one[0] + " (" + one[1] + ", " + path + ":" + one[3] + ")");
      link.href = path.split("/").map(encodeURIComponent).join("/") + ".html#L" + one[3];
      add(found, "dd", one[4]);
    });
  }

  query.addEventListener("input", search);
  query.value = new URLSearchParams(window.location.search).get("q") || "";
  search();
})();
