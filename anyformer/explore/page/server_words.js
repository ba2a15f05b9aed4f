// Notes and errors of the server in Korean; others are shown as they come.

const FIELDS = { text: "문장", target: "목표 문장" };
const SERVER_KOREAN = [
  [/^(text|target): is blank: this run reads a pair of texts$/, () => "두 번째 문장이 비어 있습니다. 이 모델은 문장 두 개를 읽습니다."],
  [/^(text|target): is blank:.*$/, (_, name) => `${FIELDS[name]}이 비어 있습니다. 문장을 입력하세요.`],
  [/^(text|target): has no tokens$/, (_, name) => `${FIELDS[name]}에 토큰이 없습니다.`],
  [/^text: of long ones only the first ([\d,]+) tokens are read$/, (_, most) => `긴 문장은 처음 ${most}토큰만 읽습니다.`],
  [
    /^(text|target) has ([\d,]+) tokens, .*: only its first ([\d,]+) of ([\d,]+) characters are read$/,
    (_, name, tokens, read, whole) => `${FIELDS[name]}이 ${tokens}토큰으로 너무 깁니다. ${whole}자 가운데 처음 ${read}자만 읽습니다.`,
  ],
  [
    /^(text|target) (.*): only its first ([\d,]+) of ([\d,]+) characters are read$/,
    (_, name, __, read, whole) => `${FIELDS[name]}이 너무 깁니다. ${whole}자 가운데 처음 ${read}자만 읽습니다.`,
  ],
  [/^(text|target): (.*): shorten it$/, (_, name) => `${FIELDS[name]}이 너무 깁니다. 줄여 주세요.`],
  [/^(text|target): (.*): nothing of it can be read$/, (_, name) => `${FIELDS[name]}이 너무 길어 읽을 수 있는 부분이 없습니다.`],
  [/^target: is for models that write: .*$/, () => "이 모델은 생성하지 않으므로 목표 문장을 쓸 수 없습니다."],
  [/^run: its model has no decoder: .*$/, () => "디코더가 없는 모델이라 KV 캐시가 없습니다."],
  [/^run: = '(.*)': is not open; .*$/, (_, name) => `${name} 런이 열려 있지 않습니다.`],
  [/^step: = (\d+): there is no checkpoint of it; .*$/, (_, step) => `스텝 ${step}의 체크포인트가 없습니다.`],
  [/^off: = '(.*)': there is no such head$/, (_, name) => `헤드 ${name}는 없습니다.`],
  [/^the shape of (.*) is (.*), that of the lesson (.*)$/, (_, name, own, shape) => `${name}의 구조는 ${own}이고, 이 수업에는 ${shape} 구조가 필요합니다.`],
  [
    /^(.*) answers '(.*)' with '(.*)', and the lesson needs '(.*)'$/,
    (_, name, text, own, answer) => `${name} 런은 "${text}"에 "${own}"라고 답합니다. 이 수업에는 "${answer}"라는 답이 필요합니다.`,
  ],
  [/^run: (.*) has no saved steps: .*$/, (_, name) => `${name} 런에는 저장된 스텝이 없습니다. train.snapshots로 학습하세요.`],
  [/^the server is ending$/, () => "서버를 끝내는 중입니다."],
];

/** A note or error of the server in the current language. */
function serverText(text) {
  if (languageNow() !== "ko") return visibleText(text);
  const [known, say] = SERVER_KOREAN.find(([one]) => one.test(text)) ?? [];
  return visibleText(known ? text.replace(known, say) : text);
}
