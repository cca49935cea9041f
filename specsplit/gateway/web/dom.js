// Makes elements. Text only ever becomes text nodes, never markup.

/** Return an element; attributes that are false, null or undefined are left out, true ones are empty. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/** Return a button that calls `onClick`. */
export function button(label, onClick, className = "quiet") {
  const made = element("button", { type: "button", class: className }, label);
  made.addEventListener("click", onClick);
  return made;
}

/** Return the element of index.html with that id. */
export function byId(id) {
  return document.getElementById(id);
}
