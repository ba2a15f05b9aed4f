// Texts around lessons, in English and Korean.

const LESSON_ENGLISH = {
  lessons: "Lessons",
  lessonsHow: "The page asks, you click, and the model answers: it computes the text again with the change you chose.",
  lessonClose: "Close",
  lessonBack: "‹ Back",
  lessonNext: "Next ›",
  lessonAll: "All lessons",
  noneOfThem: "None of them",
  lessonRight: "Right.",
  lessonWrong: "Not so.",
  "lessonWith.head": "Without this head, {} has a probability of {}; with all heads, {}.",
  "lessonWith.token": "Without this token, {} has a probability of {}; with the whole text, {}.",
  "lessonWith.step": "At this step, {} has a probability of {}; at the end of the training, {}.",
  lessonControl: "Control: all heads off",
  lessonAgain: "Try another one.",
  lessonNone: "No candidate alone brings {} below half of its probability.",
  "lessonBars.head": "The probability of {} without each head",
  "lessonBars.token": "The probability of {} without each token",
  "lessonBars.step": "The probability of {} at each step",
};
const LESSON_KOREAN = {
  lessons: "수업",
  lessonsHow: "페이지가 묻고, 여러분이 클릭하면, 모델이 답합니다. 고른 대로 바꾸어 문장을 다시 계산합니다.",
  lessonClose: "닫기",
  lessonBack: "‹ 이전",
  lessonNext: "다음 ›",
  lessonAll: "수업 목록",
  noneOfThem: "아무것도 아님",
  lessonRight: "맞습니다.",
  lessonWrong: "아닙니다.",
  "lessonWith.head": "이 헤드가 없으면 {}의 확률은 {}이고, 모든 헤드가 있으면 {}입니다.",
  "lessonWith.token": "이 토큰이 없으면 {}의 확률은 {}이고, 전체 문장에서는 {}입니다.",
  "lessonWith.step": "이 스텝에서 {}의 확률은 {}이고, 학습이 끝나면 {}입니다.",
  lessonControl: "대조: 모든 헤드를 끔",
  lessonAgain: "다른 것을 골라 보세요.",
  lessonNone: "하나만 바꾸어서는 {}의 확률이 절반 아래로 떨어지지 않습니다.",
  "lessonBars.head": "각 헤드가 없을 때 {}의 확률",
  "lessonBars.token": "각 토큰이 없을 때 {}의 확률",
  "lessonBars.step": "각 스텝에서 {}의 확률",
};
Object.assign(ENGLISH, LESSON_ENGLISH);
Object.assign(KOREAN, LESSON_KOREAN);
