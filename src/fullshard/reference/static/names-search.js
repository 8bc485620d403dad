// The search of names.html: no library, no network. NAMES comes from names-data.js.
(function () {
  "use strict";
  var MOST = 200;
  var query = document.getElementById("names-query");
  var kind = document.getElementById("names-kind");
  var told = document.getElementById("names-told");
  var found = document.getElementById("names-found");

  // Better first: the name itself, then names that begin with it, then names that hold it.
  function rank(name, text) {
    var low = name.toLowerCase();
    if (name === text) return 0;
    if (low === text.toLowerCase()) return 1;
    if (low.indexOf(text.toLowerCase()) === 0) return 2;
    return low.indexOf(text.toLowerCase()) > 0 ? 3 : -1;
  }

  function add(parent, tag, text) {
    var made = document.createElement(tag);
    if (text) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function search() {
    var text = query.value.trim();
    var hits = [];
    found.textContent = "";
    told.textContent = "";
    if (!text) return;
    NAMES.names.forEach(function (one) {
      var at = rank(one[0], text);
      if (at < 0) return;
      for (var i = 0; i < one[1].length; i += 3) {
        if (kind.value === "" || Number(kind.value) === one[1][i]) hits.push([at, one[0], one[1][i], one[1][i + 1], one[1][i + 2]]);
      }
    });
    hits.sort(function (a, b) { return a[0] - b[0] || (a[1][0] === "_") - (b[1][0] === "_") || a[1].length - b[1].length; });
    told.textContent = hits.length > MOST ? "the first " + MOST + " of " + hits.length : hits.length + " found";
    hits.slice(0, MOST).forEach(function (hit) {
      var path = NAMES.files[hit[3]];
      add(add(found, "dt"), "code", hit[1]);
      var where = add(found, "dd");
      var link = add(where, "a", path + ":" + hit[4]);
      link.href = path.split("/").map(encodeURIComponent).join("/") + ".html#L" + hit[4];
      where.appendChild(document.createTextNode(" " + NAMES.kinds[hit[2]]));
    });
  }

  query.addEventListener("input", search);
  kind.addEventListener("change", search);
  var asked = new URLSearchParams(window.location.search).get("q");
  if (asked) { query.value = asked; search(); }
})();
