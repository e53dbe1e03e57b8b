/* A text with a chat template's marks as messages by role. What no template is found in stays
   one message. */

const ROLES = {
  system: "system",
  developer: "system",
  user: "user",
  human: "user",
  assistant: "assistant",
  model: "assistant",
  ai: "assistant",
  gpt: "assistant",
  tool: "tool",
  ipython: "tool",
  observation: "tool",
  function: "tool",
  environment: "tool",
};

/* What begins a message: its role is the first group that matched, or the word's own. */
const HEADER = new RegExp(
  [
    /<\|im_start\|>(\w+)(?:\n| *)/, // Qwen and others, ChatML
    /<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*/, // Llama 3
    /<start_of_turn>(\w+)\n?/, // Gemma
    /<\|start\|>(\w+)[^<]{0,80}(?:<\|channel\|>\w+[^<]{0,80})?<\|message\|>/, // gpt-oss
    /<\|(system|user|assistant|tool|observation)\|>\n?/, // Phi, GLM
    /<\uff5c(User|Assistant)\uff5c>/, // DeepSeek
    /(\[\/?INST\]) ?/, // Mistral, Llama 2
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "g",
);

/* What ends one, and begins or ends the whole. */
const ENDS = new RegExp(
  "(?:<\\|(?:im_end|eot_id|end|endoftext|return|call|eom_id|begin_of_text|end_of_text)\\|>" +
    "|<end_of_turn>|<bos>|<eos>|</?s>|\\[gMASK\\]|<sop>|<\uff5c(?:begin|end)\u2581of\u2581sentence\uff5c>)",
  "g",
);
const TOOL_ANSWER = /^\s*<tool_response>/;

function roleOf(match) {
  const word = match.slice(1).find((group) => group !== undefined) || "";
  if (word === "[INST]") return "user";
  if (word === "[/INST]") return "assistant";
  return ROLES[word.toLowerCase()] || word;
}

/* Messages of a text: [{ role, text }]. first: the role of what stands before the first mark. */
function messagesOf(text, first = "") {
  const messages = [];
  const push = (role, part) => {
    const content = part.replace(ENDS, "");
    if (!content.trim()) return;
    const isTool = role === "user" && TOOL_ANSWER.test(content);
    messages.push({ role: isTool ? "tool" : role, text: content.replace(/^\n+|\n+$/g, "") });
  };
  let role = first,
    from = 0;
  for (const match of text.matchAll(HEADER)) {
    push(role, text.slice(from, match.index));
    role = roleOf(match);
    from = match.index + match[0].length;
  }
  push(role, text.slice(from));
  return messages;
}

/* A message's thoughts apart from its answer, where the model marks them. */
function messageParts(text, wanted) {
  const end = text.indexOf("</think>");
  if (end < 0) return [h("div", { class: "text" }, shown(text, wanted))];
  const thoughts = text.slice(0, end).replace(/^\s*<think>\n?/, "");
  return [
    thoughts.trim() &&
      h("div", { class: "text thoughts", "aria-label": "thoughts" }, shown(thoughts, wanted)),
    h(
      "div",
      { class: "text" },
      shown(text.slice(end + "</think>".length).replace(/^\n+/, ""), wanted),
    ),
  ];
}

/* nodes: what the bubble holds; facts: what stands beside its role. */
function bubble(role, nodes, facts = []) {
  const known = Object.values(ROLES).includes(role) ? role : "other";
  return h(
    "div",
    { class: "bubble " + known, "data-role": role || "text" },
    h("div", { class: "facts" }, h("b", {}, shown(role || "text")), facts),
    nodes,
  );
}

function chat(text, wanted, first = "") {
  const messages = messagesOf(text, first);
  return h(
    "div",
    { class: "chat" },
    messages.map((message) => bubble(message.role, messageParts(message.text, wanted))),
  );
}

/* The end of what was asked last, for a list. */
function snippet(prompt) {
  const asked = messagesOf(prompt).filter((message) => message.role !== "system");
  const text = asked.length ? asked[asked.length - 1].text : prompt;
  return text.trim().replace(/\s+/g, " ").slice(-120);
}
