/* Stands before the search's own worker. People paste messages and options into the search. Its query language takes `:`, `-`, `*`
   and `+` for operators, refuses most messages and finds nothing. So a query is words here, and nothing else; common words and
   single letters, which would stand for all that begins with them, are left out. */
{
  const common = new Set(
    ("a an and are as at be been before but by can cannot could do does for from has have if in into is it its no not of on or so "
    + "than that the their then there this to was were when which while will with you your").split(" "))
  const asWords = (text) => {
    const all = [...new Set(text.split(/[^\p{L}\p{N}_]+/u).filter(Boolean))]
    const telling = all.filter((word) => word.length > 1 && !common.has(word.toLowerCase()))
    return (telling.length ? telling : all).join(" ")
  }
  const listen = self.addEventListener.bind(self)
  self.addEventListener = (type, heard) => listen(type, type !== "message" ? heard : ({data}) =>
    heard({data: typeof data.data === "string" ? {...data, data: asWords(data.data)} : data}))
}
