// The search of names.html: no library, no network. NAMES comes from names-data.js.
(function () {
  "use strict";
  var MOST = 200;
  var query = document.getElementById("names-query");
  var count = document.getElementById("names-count");
  var list = document.getElementById("names-list");

  // Better first: the name itself, then names that begin with the text, then names that hold it.
  function rank(name, text) {
    var at = name.slice(name.lastIndexOf(".") + 1).toLowerCase().indexOf(text);
    return at === 0 ? (name.length === text.length ? 0 : 1) : at > 0 || name.toLowerCase().indexOf(text) >= 0 ? 2 : -1;
  }

  function add(parent, tag, text) {
    var element = document.createElement(tag);
    element.textContent = text;
    return parent.appendChild(element);
  }

  function search() {
    var text = query.value.trim().toLowerCase();
    var hits = NAMES.names.map(function (entry) { return [text ? rank(entry[0], text) : -1, entry]; })
      .filter(function (hit) { return hit[0] >= 0; })
      .sort(function (a, b) { return a[0] - b[0]; });
    list.textContent = "";
    count.textContent = !text ? "" : hits.length > MOST ? "the first " + MOST + " of " + hits.length : hits.length + " found";
    hits.slice(0, MOST).forEach(function (hit) {
      var entry = hit[1], path = NAMES.files[entry[2]];
      var link = add(add(list, "dt", ""), "a", entry[0] + " (" + entry[1] + ", " + path + ":" + entry[3] + ")");
      link.href = path.split("/").map(encodeURIComponent).join("/") + ".html#L" + entry[3];
      add(list, "dd", entry[4]);
    });
  }

  query.addEventListener("input", search);
  query.value = new URLSearchParams(window.location.search).get("q") || "";
  search();
})();
