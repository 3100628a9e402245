/* Stands before the search's own worker. People paste messages and options into the search. Its query language takes `:`, `-`, `*`
   and `+` for operators, refuses most messages and finds nothing. So a query is words here, and nothing else:
   - common words and single letters, which would stand for all that begins with them, are left out;
   - a word counts more than words that begin with it;
   - a hit counts by how much of the query is in it: of a message with ten words, one is in almost every page. */
{
  const common = new Set(
    ("a an and are as at be been before but by can cannot could do does for from has have if in into is it its no not of on or so "
    + "than that the their then there this to was were when which while will with you your").split(" "))
  const exact = 3
  const asWords = (text) => {
    const all = [...new Set(text.split(/[^\p{L}\p{N}_]+/u).filter(Boolean))]
    const telling = all.filter((word) => word.length > 1 && !common.has(word.toLowerCase()))
    return (telling.length ? telling : all).map((word) => `${word}^${exact} ${word}`).join(" ")
  }
  const weigh = ({score, terms}) => {
    const found = Object.values(terms)
    return found.length ? score * (found.filter(Boolean).length / found.length) ** 2 : 0
  }
  const best = (page) => Math.max(...page.map(weigh))

  const listen = self.addEventListener.bind(self)
  self.addEventListener = (type, heard) => listen(type, type !== "message" ? heard : ({data}) =>
    heard({data: typeof data.data === "string" ? {...data, data: asWords(data.data)} : data}))
  const post = self.postMessage
  self.postMessage = (message) => {
    message.data?.items?.sort((one, other) => best(other) - best(one))
    post(message)
  }
}
