// openai for Node: models, text, chat, streams and leaving them, tools, errors.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ timeout: 300_000 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Hello" }];
const tool = {
  type: "function",
  function: { name: "find", parameters: { type: "object", properties: { a: { type: "boolean" } }, required: ["a"] } },
};

const models = await client.models.list();
assert(models.data.some((one) => one.id === model));
const text = await client.completions.create({ model, prompt: "The sea", max_tokens: 8 });
assert(text.choices[0].text && text.usage.completion_tokens <= 8);
const chat = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
let streamed = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, chat.choices[0].message.content);
for await (const _ of await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true })) break;
const called = await client.chat.completions.create({
  model, messages, tools: [tool], tool_choice: "required", max_tokens: 100,
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "find");
const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 8 });
assert(response.output_text);
await assert.rejects(client.completions.create({ model: "none", prompt: "a" }), OpenAI.NotFoundError);
await assert.rejects(client.completions.create({ model, prompt: "a", max_tokens: -1 }), OpenAI.BadRequestError);
await assert.rejects(client.withOptions({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
