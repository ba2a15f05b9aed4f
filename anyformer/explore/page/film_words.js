// Texts of the slider over training, in English and Korean.

const FILM_ENGLISH = {
  film: "Training film",
  filmStep: "Step of the training",
  filmHint: "Show this view at every saved step of the training",
  previousStep: "Previous saved step",
  nextStep: "Next saved step",
  result: "result",
  saveGif: "Save GIF",
  saveGifHint: "This view at every saved step as an animated picture",
  gifFrame: "Drawing frame {}",
  gifStopped: "No GIF was saved: the film was stopped.",
  keyFilm: "film of the training: play, pause",
  keyTrainingSteps: "previous, next step of the training",
};
const FILM_KOREAN = {
  film: "학습 영상",
  filmStep: "학습 스텝",
  filmHint: "저장된 모든 학습 스텝에서 이 보기를 차례로 보여 줍니다",
  previousStep: "저장된 이전 스텝",
  nextStep: "저장된 다음 스텝",
  result: "결과",
  saveGif: "GIF 저장",
  saveGifHint: "저장된 모든 스텝의 이 보기를 움직이는 그림으로 저장합니다",
  gifFrame: "프레임 {} 그리는 중",
  gifStopped: "영상을 멈춰서 GIF를 저장하지 않았습니다.",
  keyFilm: "학습 영상: 재생, 일시 정지",
  keyTrainingSteps: "이전, 다음 학습 스텝",
};

Object.assign(ENGLISH, FILM_ENGLISH);
Object.assign(KOREAN, FILM_KOREAN);
