/* The theme searches when a key goes up. What is pasted with the mouse is searched, too. */
addEventListener("input", ({target}) => {
  if (target.matches("[data-md-component=search-query]"))
    target.dispatchEvent(new KeyboardEvent("keyup"))
})
